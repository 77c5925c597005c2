"""The pass as a Pallas kernel for GPUs (Triton).

Layout: a program takes some neighbouring blocks, one a row of its tile, wherever they lie in the
leaf, so that codes, scales and dense operands are all read and written in one piece. Elements that
a block lacks, at the end of a row or to the next power of two, are masked.

Not supported: leaves of 2^31 elements or more, blocks over 1024 elements, and codebooks, which need
to look numbers up.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from qstate.kernels._elements import Piece, run_elements
from qstate.kernels._geometry import Geometry
from qstate.kernels._operands import aliases, gathered, named, pairs
from qstate.kernels._program import Program, Stored
from qstate.numerics import (
    element_bits,
    narrow_scale,
    place_words,
    widen_scale,
)

_ELEMENTS = 1024  # of a program
_WARPS = 4


def supports(program: Program, shape: Geometry) -> str | None:
    """Why the kernel cannot run a program on leaves of a shape; None if it can."""
    del program
    if shape.block > _ELEMENTS:
        return f"blocks of {shape.block} elements"
    if shape.rows * shape.columns >= 2**31:
        return f"{shape.rows} x {shape.columns} elements are 2^31 or more"
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
    """Runs a program on a leaf; see the kernel for TPU."""
    lanes = pl.next_power_of_2(-(-shape.block // 2) if program.packed else shape.block)
    count = max(1, _ELEMENTS // (lanes * (2 if program.packed else 1)))
    operands = gathered(scalars, offset, seeds, dense, stored)
    structs = shape.results(program)
    results = pl.pallas_call(
        functools.partial(_kernel, program, shape, [*scalars], count, lanes),
        grid=(-(-shape.rows * shape.blocks // count),),
        out_shape=[jax.ShapeDtypeStruct((s.size,), s.dtype) for s in structs],
        input_output_aliases=aliases(program, len(dense)),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="qstate",
    )(*[x.reshape(-1) for x in operands])
    outputs = len(program.dtypes)
    results = [r.reshape(s.shape) for r, s in zip(results, structs, strict=True)]
    return results[:outputs], pairs(program.writes, results[outputs:])


def _kernel(program: Program, shape: Geometry, names, count: int, lanes: int, values, seeds, *refs):
    # values: float32[scalars]; seeds: uint32[2 + 2 * hashes], the offset first
    # all others: whole arrays, flat
    scalars, (dense, read, out, written) = named(program, names, values, refs)

    blocks = _Blocks(program, shape, count, lanes)
    row = blocks.row
    if shape.broken:
        row = (row // shape.run) * shape.stride + row % shape.run
    row = seeds[0] + row.astype(jnp.uint32)
    columns = [seeds[1] + column.astype(jnp.uint32) for column in blocks.columns]
    hashes = [
        [
            element_bits(place_words(seeds[2 + 2 * h], row), place_words(seeds[3 + 2 * h], column))
            for column in columns
        ]
        for h in range(program.hashes)
    ]
    piece = Piece(
        [blocks.load(ref) for ref in dense],
        [blocks.load_codes(ref, s) for (ref, _), s in zip(read, program.reads, strict=True)],
        [None if ref is None else blocks.load_scale(ref) for _, ref in read],
    )
    results, codes, scales = run_elements(program, scalars, piece, hashes, blocks.measure)
    for ref, parts in zip(out, results, strict=True):
        blocks.store(ref, parts)
    for (ref, scale_ref), parts, scale, s in zip(
        written, codes, scales, program.writes, strict=True
    ):
        blocks.store_codes(ref, parts, s)
        if scale is not None:
            blocks.store_scale(scale_ref, narrow_scale(scale, s.scaling.scale))


class _Blocks:
    """Where the blocks of a program lie, and their elements; a block is a row here."""

    def __init__(self, program: Program, shape: Geometry, count: int, lanes: int):
        number = pl.program_id(0) * count + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
        lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
        self._number, self._inside = number, number < shape.rows * shape.blocks
        self.row = number // shape.blocks
        start = (number - self.row * shape.blocks) * shape.block
        width = jnp.minimum(shape.columns - start, shape.block) if shape.tail else shape.block
        # (first lane's place in the block, elements) of every part.
        parts = [(0, width)]
        if program.packed:
            half = (width + 1) // 2
            parts = [(0, half), (half, width - half)]
        self.columns = [start + (first + lane) for first, _ in parts]
        self._masks = [self._inside & (lane < elements) for _, elements in parts]
        self._places = [self.row * shape.columns + column for column in self.columns]
        if program.packed:
            bytes_a_row = next(shape.code_columns(s) for s in program.storages if s.packed)
            first = (number - self.row * shape.blocks) * -(-shape.block // 2)
            self._bytes = self.row * bytes_a_row + (first + lane)

    def measure(self, parts: Sequence[jax.Array]) -> jax.Array:
        found = [
            jnp.max(jnp.where(mask, x, 0), axis=1, keepdims=True)
            for mask, x in zip(self._masks, parts, strict=True)
        ]
        return functools.reduce(jnp.maximum, found)

    def load(self, ref: Any) -> list[jax.Array]:
        places = zip(self._places, self._masks, strict=True)
        return [plgpu.load(ref.at[place], mask=mask, other=0) for place, mask in places]

    def store(self, ref: Any, parts: Sequence[jax.Array]) -> None:
        for place, mask, x in zip(self._places, self._masks, parts, strict=True):
            plgpu.store(ref.at[place], x, mask=mask)

    def load_codes(self, ref: Any, storage) -> list[jax.Array]:
        if not storage.packed:
            return [storage.format.widen(x) for x in self.load(ref)]
        pair = plgpu.load(ref.at[self._bytes], mask=self._masks[0], other=0)
        pair = storage.format.widen(pair)
        return [pair & 0xF, pair >> 4]

    def store_codes(self, ref: Any, parts: Sequence[jax.Array], storage) -> None:
        narrow = storage.format.narrow
        if not storage.packed:
            self.store(ref, [narrow(x) for x in parts])
            return
        low, high = parts
        pair = low | (jnp.where(self._masks[1], high, 0) << 4)
        plgpu.store(ref.at[self._bytes], narrow(pair), mask=self._masks[0])

    def load_scale(self, ref: Any) -> jax.Array:
        return widen_scale(plgpu.load(ref.at[self._number], mask=self._inside, other=0))

    def store_scale(self, ref: Any, scale: jax.Array) -> None:
        plgpu.store(ref.at[self._number], scale, mask=self._inside)
