"""How the plain XLA pass sees a leaf: as rows of blocks, or of halves of blocks."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qstate.numerics import (
    Blocks,
    Storage,
    blocks_of,
    element_bits,
    half_word,
    place_seeds,
    place_words,
)


class View:
    """An array as rows of blocks.

    Where all blocks are full that is another shape of the same memory, which arrays have already
    when they go through the gate: only then are they updated in place. Without blocks an array is
    left as it is (an axis of one block more would have no layout of its own, and XLA would copy).

    Where codes share bytes, the halves of a block have an axis of their own before its elements: a
    loop over that, and no other, becomes vector code on CPUs. A *part* is one of the halves, or
    None for all of a block.

    Args:
      blocks: how the array is cut.
      plain: whether it is left as it is.
      packed: whether a storage among those of the leaf has two codes a byte.
    """

    def __init__(self, blocks: Blocks, *, plain: bool, packed: bool):
        self.blocks, self.plain = blocks, plain
        self.full = not plain and blocks.extent == blocks.count * blocks.length
        self._tail = not plain and not self.full
        self.halved = packed and self.full and blocks.length % 2 == 0

    @property
    def parts(self) -> tuple[int | None, ...]:
        """The parts that lie over each other where codes share bytes."""
        return (0, 1) if self.halved else (None,)

    def enter(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape or (1,))
        return self.split(x) if self.full else x

    def rows(self, x: jax.Array, part: int | None = None) -> jax.Array:
        """What has entered, as rows or a part of them."""
        return self._part(self.split(x) if self._tail else x, part)

    def leave(self, rows: jax.Array) -> jax.Array:
        return self.join(rows) if self._tail else rows

    def exit(self, x: jax.Array) -> jax.Array:
        return self.join(x) if self.full else x

    def split(self, x: jax.Array) -> jax.Array:
        """An array as rows."""
        return self.halve(self.blocks.split(x))

    def join(self, rows: jax.Array) -> jax.Array:
        """Rows as an array."""
        return self.blocks.join(self.whole(rows))

    def halve(self, rows: jax.Array) -> jax.Array:
        """Rows, or numbers that broadcast against them, with an axis for halves if there is one."""
        if not self.halved:
            return rows
        if rows.shape[self._halves] == 1:
            return jnp.expand_dims(rows, self._halves)
        before, after = rows.shape[: self._halves], rows.shape[self._halves + 1 :]
        return rows.reshape(*before, 2, self.blocks.length // 2, *after)

    def whole(self, rows: jax.Array) -> jax.Array:
        """The inverse of `halve`, of rows."""
        if not self.halved:
            return rows
        before, after = rows.shape[: self._halves], rows.shape[self._halves + 2 :]
        return rows.reshape(*before, self.blocks.length, *after)

    def emptied(self, rows: jax.Array) -> jax.Array:
        """Rows with zeros where they were filled up: the code 0 need not stand for zero."""
        return self.split(self.join(rows)) if self._tail else rows

    def rows_of(self, rows: jax.Array, other: "View", part: int | None) -> jax.Array:
        """Rows of another view as rows of this one, or the same part of both."""
        if self.blocks == other.blocks:
            return rows
        return self.rows(self.enter(other.join(rows)), part)

    def enter_bytes(self, packed: jax.Array) -> jax.Array:
        """Codes that share bytes, as rows of bytes; only where there are halves."""
        return self._bytes.split(packed)

    def exit_bytes(self, rows: jax.Array) -> jax.Array:
        return self._bytes.join(rows)

    def codes(self, rows: jax.Array, part: int | None) -> jax.Array:
        """Codes (uint8) of all of a block or a part, from rows of bytes."""
        if part is not None:
            return rows >> 4 if part else rows & 0xF
        rows = jnp.expand_dims(rows, self._halves)
        shape = [2 if axis == self._halves else 1 for axis in range(rows.ndim)]
        high = lax.broadcasted_iota(jnp.uint8, shape, self._halves) > 0
        return jnp.where(high, rows >> 4, rows & 0xF)

    def spread(self, storage: Storage, scales: Any, part: int | None) -> jax.Array:
        """Scales in a shape that broadcasts against rows, or against a part of them."""
        rows = storage.scaling.spread(scales, self.blocks)
        if part is not None and rows.shape[self._halves] == 1:
            return rows
        return self._part(self.halve(rows), part)

    def maximum(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Every block's largest integer, of rows or of all parts of them."""
        if not self.halved:
            return self.blocks.maximum(parts[0])
        if len(parts) == 1:
            parts = [self.rows(parts[0], part) for part in self.parts]
        return self._bytes.maximum(jnp.maximum(*parts))

    @property
    def _bytes(self) -> Blocks:
        """Blocks of bytes that halves share."""
        half = self.blocks.length // 2
        return self.blocks._replace(length=half, extent=self.blocks.count * half)

    def _part(self, rows: jax.Array, part: int | None) -> jax.Array:
        if part is None:
            return rows
        return lax.index_in_dim(rows, part, self._halves, keepdims=False)

    @property
    def _halves(self) -> int:
        return self.blocks.axis + 1


def views(storages: Sequence[Storage], shape: tuple[int, ...]) -> list[View]:
    """A view for every storage; those that need no blocks of their own take those of others."""
    blocks = [blocks_of(s, shape) for s in storages]
    own = [s.has_scales or s.packed for s in storages]
    other = next((b for b, has in zip(blocks, own, strict=True) if has), None)
    packed = any(s.packed for s in storages)
    return [
        View(b if has or other is None else other, plain=not has and other is None, packed=packed)
        for b, has in zip(blocks, own, strict=True)
    ]


class Randomness:
    """The random bits of a leaf, its rows and columns mixed already."""

    def __init__(self, words: jax.Array, shape: tuple[int, ...]):
        shape = shape or (1,)
        row_seed, column_seed = place_seeds(words)
        rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)
        self._rows = place_words(row_seed, rows).reshape(*shape[:-1], 1)
        self._columns = place_words(column_seed, jnp.arange(shape[-1], dtype=jnp.uint32))

    def bits(self, view: View, j: int, part: int | None) -> jax.Array:
        """16 bits (uint32) an element for average ``j``, as rows of a view or a part of them."""
        blocks = view.blocks
        if view.plain:
            word = element_bits(self._rows, self._columns)
        elif blocks.behind:
            whole = view.enter(element_bits(self._rows, self._columns))
            word = view.rows(whole, part)
        else:
            columns = View(
                Blocks(0, blocks.length, blocks.extent, 0), plain=False, packed=view.halved
            )
            rows = self._rows[..., None]
            rows = rows[..., None] if view.halved and part is None else rows
            word = element_bits(rows, columns.rows(columns.enter(self._columns), part))
        return half_word(word, j)
