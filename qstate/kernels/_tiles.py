"""The pass as a loop over tiles of rows, in place: the way on CPUs, in plain XLA.

Layout: the leaf as (rows, columns); a tile as (rows, blocks, block). The new averages of a tile are
put down in memory before they are measured, encoded and used. That is for speed, and so that XLA
need not copy the arrays that the loop updates: nothing reads a tile's old codes any more when the
new ones are written.

Not supported: codebooks, which are no faster this way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qstate.kernels._elements import Piece, advance, emit, encode_all, keep, measure_all
from qstate.kernels._gate import Gate
from qstate.kernels._geometry import Geometry, flat, pairs
from qstate.kernels._program import Program, Stored
from qstate.numerics import (
    Blocks,
    Minifloat,
    Storage,
    element_bits,
    narrow_scale,
    pack,
    place_words,
    unpack,
    widen_scale,
)

_MOST_ELEMENTS = 2**20  # of a tile: two averages in float32 fit a processor's cache
_FEWEST_ELEMENTS = 2**16  # a tile's operations cost some microseconds to start


def supports(program: Program, shape: Geometry) -> str | None:
    """Why the loop cannot run a program on leaves of a shape; None if it can."""
    del shape
    for storage in program.storages:
        if not isinstance(storage.format, Minifloat):
            return f"{storage.format} is a codebook"
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
    gate: Gate,
) -> tuple[list[jax.Array], list[Stored]]:
    """Runs a program on a leaf; see the kernel for TPU.

    ``gate`` holds the averages of a tile.
    """
    if not any(s.has_scales or s.packed for s in program.storages):
        shape = Geometry(shape.rows, shape.columns, block=shape.columns)
    elements = min(max(shape.rows * shape.columns // 4, _FEWEST_ELEMENTS), _MOST_ELEMENTS)
    height = min(max(elements // shape.columns, 1), shape.rows)
    dense_structs = [jax.ShapeDtypeStruct((shape.rows, shape.columns), t) for t in program.dtypes]
    outputs = [
        dense[source] if source is not None else lax.empty(struct.shape, struct.dtype)
        for source, struct in zip(program.onto, dense_structs, strict=True)
    ]
    written = flat(stored)
    if not program.in_place:
        written = [lax.empty(s.shape, s.dtype) for s in shape.structs(program.writes)]
    places = {source: k for k, source in enumerate(program.onto) if source is not None}

    places_of_rows = offset[0] + jnp.arange(shape.rows, dtype=jnp.uint32)
    places_of_columns = offset[1] + jnp.arange(shape.blocks * shape.block, dtype=jnp.uint32)
    column_words = [
        place_words(seeds[2 * h + 1], places_of_columns).reshape(1, shape.blocks, shape.block)
        for h in range(program.hashes)
    ]
    row_words = [place_words(seeds[2 * h], places_of_rows) for h in range(program.hashes)]

    def tile(start, height, carried):
        # What is updated in place is read where it is updated, everything else from outside.
        outputs, written = carried
        sources = [outputs[places[k]] if k in places else x for k, x in enumerate(dense)]
        read = pairs(program.reads, written) if program.in_place else stored
        rows = _Rows(program, shape, start, height)
        results, new = rows.step(sources, read, scalars, row_words, column_words, gate)
        put = lambda whole, part: lax.dynamic_update_slice(  # noqa: E731
            whole, part, (start, 0), allow_negative_indices=False
        )
        return (
            [put(whole, part) for whole, part in zip(outputs, results, strict=True)],
            [put(whole, part) for whole, part in zip(written, new, strict=True)],
        )

    whole, rest = divmod(shape.rows, height)
    carried = (outputs, written)
    if whole > 1:
        body = lambda i, carried: tile(i * height, height, carried)  # noqa: E731
        carried = lax.fori_loop(0, whole, body, carried)
    else:
        carried = tile(0, height, carried)
    if rest:
        carried = tile(shape.rows - rest, rest, carried)
    outputs, written = carried
    return list(outputs), pairs(program.writes, written)


class _Rows:
    """Some neighbouring rows of a leaf."""

    def __init__(self, program: Program, shape: Geometry, start: Any, height: int):
        self._program, self._shape, self._start, self._height = program, shape, start, height
        self._blocks = Blocks(axis=1, length=shape.block, extent=shape.columns, behind=0)

    def step(self, dense, stored, scalars, row_words, column_words, gate: Gate):
        """Tiles of the outputs and of what is written, one array after the other."""
        program = self._program

        def read():
            piece = Piece(
                [[self._blocks.split(self._slice(x))] for x in dense],
                [
                    [s.format.widen(self._unpacked(self._slice(codes), s))]
                    for (codes, _), s in zip(stored, program.reads, strict=True)
                ],
                [
                    None if scales is None else widen_scale(self._slice(scales))[:, :, None]
                    for _, scales in stored
                ],
            )
            return advance(program, scalars, piece)

        fresh = gate.hold(read)
        kept = keep(program, scalars, fresh)

        def results():
            # As they lie in the leaf: only then are they written where an operand is read.
            joined = [[self._blocks.join(x) for x in part] for part in fresh]
            outputs = emit(program, scalars, [[self._slice(x)] for x in dense], joined)
            return [x for (x,) in outputs], measure_all(program, kept, self._measure)

        outputs, measured = gate.hold(results)

        def encode():
            hashes = self._hashes(row_words, column_words)
            codes, scales = encode_all(program, kept, measured, hashes, self._measure)
            narrowed = [s.format.narrow(c) for (c,), s in zip(codes, program.writes, strict=True)]
            return narrowed, scales

        # Packed in the same loop as it is rounded, a code would take ten times as long: no loop
        # over halves of blocks becomes vector code.
        codes, scales = gate.hold(encode) if program.packed else encode()
        new = [
            (
                self._packed(c, s),
                None if scale is None else narrow_scale(scale[:, :, 0], s.scaling.scale),
            )
            for c, scale, s in zip(codes, scales, program.writes, strict=True)
        ]
        return outputs, flat(new)

    def _slice(self, x: jax.Array) -> jax.Array:
        start, sizes = (self._start, *(0,) * (x.ndim - 1)), (self._height, *x.shape[1:])
        return lax.dynamic_slice(x, start, sizes, allow_negative_indices=False)

    def _measure(self, parts: Sequence[jax.Array]) -> jax.Array:
        (x,) = parts
        if self._shape.tail:
            place = lax.broadcasted_iota(jnp.int32, x.shape[1:], 0) * self._shape.block
            place += lax.broadcasted_iota(jnp.int32, x.shape[1:], 1)
            x = jnp.where(place < self._shape.columns, x, 0)
        return self._blocks.maximum(x)[:, :, None]

    def _hashes(self, row_words, column_words) -> list[list[jax.Array]]:
        return [
            [element_bits(self._slice(row)[:, None, None], column)]
            for row, column in zip(row_words, column_words, strict=True)
        ]

    @property
    def _by_words(self) -> bool:
        """Whether the halves of blocks can be worked on four codes at a time."""
        return self._shape.block % 8 == 0 and not self._shape.tail

    def _unpacked(self, codes: jax.Array, storage: Storage) -> jax.Array:
        """Codes as (rows, blocks, block)."""
        if not storage.packed:
            return self._blocks.split(codes)
        if not self._by_words:
            return unpack(codes, self._blocks)
        words = codes.reshape(self._height, self._shape.blocks, 1, -1, 4)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        shifts = lax.broadcasted_iota(jnp.uint32, (2, 1), 0) * 4
        halves = (words >> shifts) & jnp.uint32(0x0F0F0F0F)
        codes = lax.bitcast_convert_type(halves, jnp.uint8)
        return codes.reshape(self._height, self._shape.blocks, self._shape.block)

    def _packed(self, codes: jax.Array, storage: Storage) -> jax.Array:
        """The inverse of `_unpacked`, as (rows, bytes)."""
        if not storage.packed:
            return self._blocks.join(codes)
        if not self._by_words:
            return pack(codes, self._blocks)
        words = codes.reshape(self._height, self._shape.blocks, 2, -1, 4)
        words = lax.bitcast_convert_type(words, jnp.uint32)
        pair = words[:, :, 0] | (words[:, :, 1] << 4)
        return lax.bitcast_convert_type(pair, jnp.uint8).reshape(self._height, -1)
