"""The pass as a Pallas kernel for TPU (Mosaic).

Layout: the leaf as (rows, columns), cut into tiles of some rows and a few blocks. Within a tile a
few rows of one block at a time are in registers. The scales of a row lie in one tile, of which a
column is picked, and put back, by comparing its number: single columns cannot be addressed.

Not supported: 4-bit codes where the last block of a long row is not full, blocks over 1024
elements, float16, and codebooks, which need to look numbers up.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qstate.kernels._elements import Piece, run_elements
from qstate.kernels._geometry import Geometry
from qstate.kernels._operands import aliases, flat, gathered, named, pairs
from qstate.kernels._program import Program, Stored
from qstate.numerics import (
    Storage,
    element_bits,
    narrow_scale,
    place_words,
    widen_scale,
)

_STRIP_ROWS = 32  # the height of a register of bytes
_TILE_ROWS = 128
_TILE_COLUMNS = 2048
_WHOLE_ROW = 8192


def supports(program: Program, shape: Geometry) -> str | None:
    """Why the kernel cannot run a program on leaves of a shape; None if it can."""
    for storage in program.storages:
        if storage.format.dtype == jnp.float16:
            return "TPUs have no float16"
    if shape.block > 1024:
        return f"blocks of {shape.block} elements"
    if program.packed and shape.tail and shape.columns > _WHOLE_ROW:
        return f"4-bit codes in rows of {shape.columns}, which end within a block"
    if shape.broken and shape.run % _STRIP_ROWS:
        return f"runs of {shape.run} rows in a shard"
    if shape.columns > shape.block and shape.block % 2:
        return f"blocks of {shape.block} elements"
    return None


def run(
    program: Program,
    shape: Geometry,
    dense: Sequence[jax.Array],
    stored: Sequence[Stored],
    scalars: Mapping[str, jax.Array],
    seeds: jax.Array,
    offset: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[list[jax.Array], list[Stored]]:
    """Runs a program on a leaf.

    Args:
      program: what to compute.
      shape: how the leaf is cut.
      dense: dense operands, (rows, columns).
      stored: codes, (rows, columns) or (rows, bytes), and scales, (rows, blocks), that are read.
      scalars: the program's scalars, float32[].
      seeds: uint32[2 * hashes], seeds of rows and columns.
      offset: uint32[2], row and column of the first element in the whole array.
      interpret: for tests: run on any machine, slowly.

    Returns:
      The outputs, and the codes and scales that are written.
    """
    tiles = _Tiles.of(program, shape)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    outputs, fresh = len(program.dtypes), _fresh(program)
    operands = gathered(scalars, offset, seeds, dense, stored)
    placed = {len(operands) + i: k for i, k in enumerate(fresh)}
    results = pl.pallas_call(
        functools.partial(_kernel, program, shape, tiles, [*scalars]),
        grid=tiles.grid,
        in_specs=[
            smem,
            smem,
            *[tiles.dense] * len(dense),
            *flat([tiles.stored(s) for s in program.reads]),
            *[pl.BlockSpec(memory_space=pl.ANY)] * len(fresh),
        ],
        out_specs=[
            *[tiles.dense] * outputs,
            *flat([tiles.stored(s) for s in program.writes]),
        ],
        out_shape=shape.results(program),
        input_output_aliases=aliases(program, len(dense)) | placed,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="qstate",
    )(*operands, *[lax.empty((shape.rows, shape.columns), program.dtypes[k]) for k in fresh])
    return list(results[:outputs]), pairs(program.writes, results[outputs:])


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How a leaf is cut into tiles."""

    shape: Geometry
    rows: int  # of a tile
    strip: int  # rows in registers, which divide a tile's
    blocks: int  # of a tile
    grid: tuple[int, int]

    @classmethod
    def of(cls, program: Program, shape: Geometry) -> "_Tiles":
        blocks = max(1, _TILE_COLUMNS // shape.block)
        if blocks > shape.blocks or (program.packed and shape.tail):
            blocks = shape.blocks
        rows = _TILE_ROWS if shape.rows >= _TILE_ROWS else _STRIP_ROWS
        rows = min(rows, shape.rows)
        grid = (-(-shape.rows // rows), -(-shape.blocks // blocks))
        return cls(shape, rows, min(rows, _STRIP_ROWS), blocks, grid)

    @property
    def whole(self) -> bool:
        """Whether a tile has whole rows."""
        return self.grid[1] == 1

    @property
    def dense(self) -> pl.BlockSpec:
        columns = self.shape.columns if self.whole else self.blocks * self.shape.block
        return pl.BlockSpec((self.rows, columns), lambda i, j: (i, j))

    def stored(self, storage: Storage) -> Any:
        columns = self.shape.code_columns(storage)
        if not self.whole:
            columns = self.blocks * self.shape.block // (2 if storage.packed else 1)
        codes = pl.BlockSpec((self.rows, columns), lambda i, j: (i, j))
        scales = pl.BlockSpec((self.rows, self.shape.blocks), lambda i, j: (i, 0))
        return codes, scales if storage.has_scales else None


def _fresh(program: Program) -> list[int]:
    """Numbers of 16-bit outputs that take no operand's memory, which is made for them.

    Beside results of 8 bits XLA would tile them otherwise on a TPU v7x than what a program takes
    and returns, and copy them; a result that takes an operand's memory is tiled like that one.
    """
    return [
        k
        for k, (dtype, onto) in enumerate(zip(program.dtypes, program.onto, strict=True))
        if onto is None and jnp.dtype(dtype).itemsize == 2
    ]


def _kernel(program: Program, shape: Geometry, tiles: _Tiles, names, values, seeds, *refs):
    # values: SMEM float32[scalars]; seeds: SMEM uint32[2 + 2 * hashes], the offset first
    # dense, outputs: (rows, columns) of a tile; codes: the same, or half as many columns
    # scales: (rows, all blocks of a row)
    results = len(shape.results(program))
    refs = refs[: len(refs) - results - len(_fresh(program))] + refs[len(refs) - results :]
    scalars, (dense, read, out, written) = named(program, names, values, refs)
    i, j = pl.program_id(0), pl.program_id(1)

    def strip(k, _):
        rows = pl.ds(pl.multiple_of(k * tiles.strip, tiles.strip), tiles.strip)
        first = i * tiles.rows + k * tiles.strip
        if shape.broken:
            first = lax.div(first, shape.run) * shape.stride + lax.rem(first, shape.run)
        row = seeds[0] + first.astype(jnp.uint32) + _iota((tiles.strip, 1), 0)
        row_words = [place_words(seeds[2 + 2 * h], row) for h in range(program.hashes)]
        old = [None if scale is None else widen_scale(scale[rows, :]) for _, scale in read]
        new = [None if scale is None else widen_scale(scale[rows, :]) for _, scale in written]
        places = lax.broadcasted_iota(jnp.int32, (tiles.strip, shape.blocks), 1)
        for b in range(tiles.blocks):
            block = _BlockPlace(program, shape, tiles, rows, j, b)
            hashes = [
                [
                    element_bits(word, place_words(seeds[3 + 2 * h], seeds[1] + column))
                    for column in block.columns()
                ]
                for h, word in enumerate(row_words)
            ]
            here = places == j * tiles.blocks + b
            piece = Piece(
                [block.load(ref) for ref in dense],
                [block.load_codes(ref, s) for (ref, _), s in zip(read, program.reads, strict=True)],
                [None if tile is None else _column(tile, here) for tile in old],
            )
            results, codes, scales = run_elements(program, scalars, piece, hashes, block.measure)
            for ref, parts in zip(out, results, strict=True):
                block.store(ref, parts)
            for (ref, _), parts, s in zip(written, codes, program.writes, strict=True):
                block.store_codes(ref, parts, s)
            new = [
                None if scale is None or tile is None else jnp.where(here, scale, tile)
                for tile, scale in zip(new, scales, strict=True)
            ]
        for (_, ref), tile, s in zip(written, new, program.writes, strict=True):
            if tile is not None:
                ref[rows, :] = narrow_scale(tile, s.scaling.scale)

    lax.fori_loop(0, tiles.rows // tiles.strip, strip, None)


class _BlockPlace:
    """Where block ``b`` of a tile lies in it, for some of its rows."""

    def __init__(self, program: Program, shape: Geometry, tiles: _Tiles, rows: Any, j: Any, b: int):
        self._rows, self._start, self._block = rows, b * shape.block, shape.block
        self._first = j * (tiles.blocks * shape.block) + self._start
        self._width, self._limit = shape.block, None
        if shape.tail and tiles.whole and b == tiles.blocks - 1:
            self._width = shape.tail
        elif shape.tail and not tiles.whole:
            self._limit = shape.columns  # beyond are no numbers of the array
        half = -(-self._width // 2)
        # (start within the block, width) of every part.
        self._parts = (
            [(0, half), (half, self._width - half)] if program.packed else [(0, self._width)]
        )
        self._parts = [part for part in self._parts if part[1]]

    def columns(self) -> list[jax.Array]:
        """Numbers of a part's columns, uint32 (1, width)."""
        first = jnp.asarray(self._first).astype(jnp.uint32)
        return [first + jnp.uint32(start) + _iota((1, width), 1) for start, width in self._parts]

    def measure(self, parts: Sequence[jax.Array]) -> jax.Array:
        found = []
        for x, column in zip(parts, self.columns(), strict=True):
            if self._limit is not None:
                x = jnp.where(column < self._limit, x, 0)
            found.append(jnp.max(x, axis=1, keepdims=True))
        return functools.reduce(jnp.maximum, found)

    def load(self, ref) -> list[jax.Array]:
        return [ref[self._rows, self._start + a : self._start + a + n] for a, n in self._parts]

    def store(self, ref, parts: Sequence[jax.Array]) -> None:
        for (a, n), x in zip(self._parts, parts, strict=True):
            ref[self._rows, self._start + a : self._start + a + n] = x

    def load_codes(self, ref, storage: Storage) -> list[jax.Array]:
        if not storage.packed:
            return [storage.format.widen(x) for x in self.load(ref)]
        low = storage.format.widen(ref[self._rows, self._bytes(0)]) & 0xF
        if len(self._parts) == 1:
            return [low]
        return [low, storage.format.widen(ref[self._rows, self._bytes(1)]) >> 4]

    def store_codes(self, ref, parts: Sequence[jax.Array], storage: Storage) -> None:
        narrow = storage.format.narrow
        if not storage.packed:
            self.store(ref, [narrow(x) for x in parts])
        elif len(parts) == 2 and parts[0].shape == parts[1].shape:
            ref[self._rows, self._bytes(0)] = narrow(parts[0] | (parts[1] << 4))
        else:  # a block of odd length
            ref[self._rows, self._bytes(0)] = narrow(parts[0])
            for high in parts[1:]:
                low = parts[0][:, : high.shape[1]]
                ref[self._rows, self._bytes(1)] = narrow(low | (high << 4))

    def _bytes(self, part: int) -> slice:
        """Where the codes of a part lie, two a byte."""
        first = self._start // 2
        return slice(first, first + self._parts[part][1])


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis).astype(jnp.uint32)


def _column(tile: jax.Array, here: jax.Array) -> jax.Array:
    """The column of a tile where a mask is set, (rows, 1)."""
    return jnp.sum(jnp.where(here, tile, jnp.zeros_like(tile)), axis=1, keepdims=True)
