"""The pass in plain XLA, in place: the way on CPUs, and the fallback everywhere.

No loop fits all of it: XLA fuses no two results into one, and runs what updates a slice in place on
one thread. So it is a few loops over the whole leaf, each of them fused, each on all threads:
codes are read and the outputs computed; then, for one average after the other, the largest of every
block is found, and the codes are written where the old ones were. They go through a gate, so that
nothing still reads the old codes when they are overwritten: no copy of them is made, and no average
is ever in memory in float32. All is elementwise, or within a block: whatever the partition, XLA
keeps to it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qstate.kernels._gate import Gate
from qstate.kernels._program import Program, Stored
from qstate.numerics import (
    Blocks,
    Storage,
    blocks_of,
    decode_by_half,
    decode_scaled,
    decode_unscaled,
    element_bits,
    encode_scaled,
    encode_unscaled,
    half_word,
    magnitudes,
    narrow_scale,
    pack,
    place_seeds,
    place_words,
    scale_number,
    unpack,
    widen_scale,
)


def run(
    program: Program,
    shape: tuple[int, ...],
    dense: Sequence[jax.Array],
    stored: Sequence[Stored],
    scalars: Mapping[str, jax.Array],
    words: jax.Array,
    gate: Gate,
    *,
    on_cpu: bool = False,
) -> tuple[list[jax.Array], list[Stored]]:
    """Runs a program on a leaf of any shape, with any storages.

    Args:
      program: what to compute.
      shape: of the leaf.
      dense: dense operands, of that shape.
      stored: codes and scales that are read.
      scalars: the program's scalars, float32[].
      words: uint32[hashes, 2], keys of the random bits.
      gate: what the loops pass through, one after the other.
      on_cpu: whether to take ways that are fast on CPUs alone; the numbers are the same.

    Returns:
      The outputs, and the codes and scales that are written.
    """
    leaf = _Leaf(program, shape, dense, stored, scalars, words, gate, on_cpu)
    outputs = leaf.emit() if program.dtypes else []
    return outputs, [leaf.write(j) for j in range(len(program.writes))]


class _Leaf:
    """A program's operands for one leaf, as they go through the gate."""

    def __init__(self, program, shape, dense, stored, scalars, words, gate: Gate, on_cpu: bool):
        self._program, self._scalars, self._gate, self._on_cpu = program, scalars, gate, on_cpu
        self._views = _views(program.storages, shape)
        self._dense, self._shape = dense, shape
        self._random = [_Random(words[h], shape) for h in range(program.hashes)]
        self._scales = [scales for _, scales in stored]
        self._codes = [
            self._unpack(codes, storage, view)
            for (codes, _), storage, view in zip(stored, program.reads, self._views, strict=False)
        ]

    def emit(self) -> list[jax.Array]:
        """The outputs."""
        program, view = self._program, self._views[0]
        dense = [view.enter(x) for x in self._dense]
        sources = [source for source in program.onto if source is not None]

        def step(updated):
            operands = list(dense)
            for source, x in zip(sources, updated, strict=True):
                operands[source] = x
            rows = [view.rows(x).astype(jnp.float32) for x in operands]
            results = program.emit(self._scalars, rows, self._fresh(view, operands, self._codes))
            results = [
                view.leave(x.astype(dtype))
                for x, dtype in zip(results, program.dtypes, strict=True)
            ]
            pairs = list(zip(results, program.onto, strict=True))
            return [x for x, onto in pairs if onto is None], [
                x for x, onto in pairs if onto is not None
            ]

        new, in_place = map(iter, self._gate(step, [dense[source] for source in sources]))
        results = (next(new if onto is None else in_place) for onto in program.onto)
        return [view.exit(x).reshape(self._shape) for x in results]

    def write(self, j: int) -> Stored:
        """Codes and scales of average ``j``."""
        program, storage, view = self._program, self._program.writes[j], self._views[j]
        scaling, blocks, format = storage.scaling, view.blocks, storage.format
        dense = [view.enter(x) for x in self._dense]

        def kept(codes):
            old = [*self._codes[:j], codes, *self._codes[j + 1 :]] if program.reads else []
            return program.keep(self._scalars, self._fresh(view, dense, old))[j]

        def measure(_):
            x = kept(self._codes[j] if program.reads else None)
            return scaling.measure(view.emptied(magnitudes([x], storage)[0]), blocks), None

        def encode(own):
            codes, previous = own
            x = kept(codes)
            bits = self._random[j // 2].bits(view, j) if storage.stochastic else None
            if not storage.has_scales:
                return view.leave(format.narrow(encode_unscaled(x, storage, bits))), None
            (new,), wide = encode_scaled(
                [x],
                storage,
                [bits],
                measured,
                measure=lambda parts: scaling.measure(parts[0], blocks),
                spread=lambda scales: scaling.spread(scales, blocks),
                previous=previous,
            )
            scales = jax.tree.map(lambda w: narrow_scale(w, scaling.scale), wide)
            return view.leave(format.narrow(new)), scales

        measured = self._gate(measure)[0] if storage.has_scales else None
        if program.reads:
            own = self._codes[j], self._scales[j]
            _, (codes, scales) = self._gate(lambda own: (None, encode(own)), own)
        else:
            (codes, scales), _ = self._gate(lambda _: (encode((None, None)), None))
        return self._pack(codes, storage, view), scales

    def _fresh(self, view: "_View", dense: Sequence[jax.Array], codes: Sequence[Any]) -> Any:
        """The new averages, as rows of a view; ``dense`` and ``codes`` as they go through."""
        rows = [view.rows(x).astype(jnp.float32) for x in dense]
        reads = self._program.reads
        old = [
            view.rows_of(self._decode(own.rows(c), scales, storage, own), own)
            for c, scales, storage, own in zip(
                codes, self._scales, reads, self._views[: len(reads)], strict=True
            )
        ]
        return self._program.advance(self._scalars, rows, old)

    def _decode(self, codes: jax.Array, scales: Any, storage: Storage, view: "_View") -> jax.Array:
        if not storage.has_scales:
            return decode_unscaled(storage.format.widen(codes), storage)
        numbers = jax.tree.map(lambda s: scale_number(widen_scale(s)), scales)
        scale = storage.scaling.spread(numbers, view.blocks)
        if self._on_cpu and storage.format.fits_half:
            return decode_by_half(codes, scale, storage, self._gate.open)
        return decode_scaled(storage.format.widen(codes), scale, storage)

    # Unpacked in the loop that uses it, or packed in the one that rounds it, a code takes ten times
    # as long on CPUs: no loop over halves of blocks becomes vector code.

    def _unpack(self, codes: jax.Array, storage: Storage, view: "_View") -> jax.Array:
        if not storage.packed:
            return view.enter(codes)
        if self._on_cpu and view.by_words:
            return self._gate(lambda _: (_unpack_words(codes, view.blocks), None))[0]
        return self._gate(lambda _: (view.leave(unpack(codes, view.blocks)), None))[0]

    def _pack(self, codes: jax.Array, storage: Storage, view: "_View") -> jax.Array:
        if not storage.packed:
            return view.exit(codes)
        if self._on_cpu and view.by_words:
            return self._gate(lambda _: (_pack_words(codes, view.blocks), None))[0]
        return self._gate(lambda _: (pack(view.rows(codes), view.blocks), None))[0]


class _View:
    """An array as rows of blocks.

    Where all blocks are full that is another shape of the same memory, which arrays have already
    when they go through the gate: only then are they updated in place. Without blocks an array is
    left as it is (an axis of one block more would have no layout of its own, and XLA would copy).
    """

    def __init__(self, blocks: Blocks, *, plain: bool):
        self.blocks, self.plain = blocks, plain
        self._full = not plain and blocks.extent == blocks.count * blocks.length
        self._tail = not plain and not self._full

    def enter(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape or (1,))
        return self.blocks.split(x) if self._full else x

    def rows(self, x: jax.Array) -> jax.Array:
        return self.blocks.split(x) if self._tail else x

    def leave(self, rows: jax.Array) -> jax.Array:
        return self.blocks.join(rows) if self._tail else rows

    def exit(self, x: jax.Array) -> jax.Array:
        return self.blocks.join(x) if self._full else x

    def emptied(self, rows: jax.Array) -> jax.Array:
        """Rows with zeros where they were filled up: the code 0 need not stand for zero."""
        return self.blocks.split(self.blocks.join(rows)) if self._tail else rows

    def rows_of(self, rows: jax.Array, other: "_View") -> jax.Array:
        """Rows of another view as rows of this one."""
        return rows if self.blocks == other.blocks else self.blocks.split(other.blocks.join(rows))

    @property
    def by_words(self) -> bool:
        """Whether the halves of blocks can be worked on four codes at a time."""
        return self._full and not self.blocks.behind and self.blocks.length % 8 == 0


def _views(storages: Sequence[Storage], shape: tuple[int, ...]) -> list[_View]:
    """A view for every storage; those that need no blocks of their own take those of others."""
    blocks = [blocks_of(s, shape) for s in storages]
    own = [s.has_scales or s.packed for s in storages]
    other = next((b for b, has in zip(blocks, own, strict=True) if has), None)
    return [
        _View(b if has or other is None else other, plain=not has and other is None)
        for b, has in zip(blocks, own, strict=True)
    ]


class _Random:
    """The random bits of a leaf, its rows and columns mixed already."""

    def __init__(self, words: jax.Array, shape: tuple[int, ...]):
        shape = shape or (1,)
        row_seed, column_seed = place_seeds(words)
        rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)
        self._rows = place_words(row_seed, rows).reshape(*shape[:-1], 1)
        self._columns = place_words(column_seed, jnp.arange(shape[-1], dtype=jnp.uint32))

    def bits(self, view: _View, j: int) -> jax.Array:
        """16 bits (uint32) an element for average ``j``, as rows of a view."""
        blocks = view.blocks
        if view.plain:
            word = element_bits(self._rows, self._columns)
        elif blocks.behind:
            word = blocks.split(element_bits(self._rows, self._columns))
        else:
            columns = Blocks(0, blocks.length, blocks.extent, 0).split(self._columns)
            word = element_bits(self._rows[..., None], columns)
        return half_word(word, j)


def _unpack_words(codes: jax.Array, blocks: Blocks) -> jax.Array:
    words = codes.reshape(*codes.shape[:-1], blocks.count, 1, -1, 4)
    words = lax.bitcast_convert_type(words, jnp.uint32)
    halves = (words >> (lax.broadcasted_iota(jnp.uint32, (2, 1), 0) * 4)) & jnp.uint32(0x0F0F0F0F)
    rows = lax.bitcast_convert_type(halves, jnp.uint8)
    return rows.reshape(*codes.shape[:-1], blocks.count, blocks.length)


def _pack_words(rows: jax.Array, blocks: Blocks) -> jax.Array:
    words = rows.reshape(*rows.shape[:-1], 2, -1, 4)
    words = lax.bitcast_convert_type(words, jnp.uint32)
    pair = words[..., 0, :] | (words[..., 1, :] << 4)
    return lax.bitcast_convert_type(pair, jnp.uint8).reshape(*rows.shape[:-2], -1)
