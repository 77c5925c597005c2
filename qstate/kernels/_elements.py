"""The body of all kernels: what happens to a piece of a leaf, whatever the backend.

A piece comes in *parts* that lie over each other, so that the halves of a block that share bytes
need no shuffling: one part, or the two halves. Every function here works on values, with nothing
but arithmetic on int32, uint32 and float32.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qstate.kernels._program import Program, Scalars
from qstate.numerics import (
    decode_scaled,
    decode_unscaled,
    encode_scaled,
    encode_unscaled,
    half_word,
    magnitudes,
    scale_number,
)

Parts = Sequence[jax.Array]
Measure = Callable[[Parts], jax.Array]


class Piece(NamedTuple):
    """What is read of a piece."""

    dense: Sequence[Parts]  # parts of every dense operand
    codes: Sequence[Parts]  # parts (int32) of every average that is read
    scales: Sequence[jax.Array | None]  # wide, to broadcast against a part; None without scales


def advance(program: Program, scalars: Scalars, piece: Piece) -> list[Sequence[jax.Array]]:
    """New averages (float32), a list a part."""
    old = [
        [_decode(p, scale, storage) for p in parts]
        for parts, scale, storage in zip(*piece[1:], program.reads, strict=True)
    ]
    parts = range(len((*piece.dense, *piece.codes)[0]))
    return [program.advance(scalars, _part(piece.dense, i), _part(old, i)) for i in parts]


def emit(
    program: Program, scalars: Scalars, dense: Sequence[Parts], fresh: Sequence[Any]
) -> list[Parts]:
    """Parts of every output, from parts of the dense operands and what `advance` returned."""
    parts = range(len(fresh))
    emitted = [program.emit(scalars, _part(dense, i), fresh[i]) for i in parts]
    return [[emitted[i][k].astype(dtype) for i in parts] for k, dtype in enumerate(program.dtypes)]


def keep(program: Program, scalars: Scalars, fresh: Sequence[Any]) -> list[Parts]:
    """Parts of every average that is written, from what `advance` returned."""
    kept = [program.keep(scalars, f) for f in fresh]
    return [[k[j] for k in kept] for j in range(len(program.writes))]


def measure_all(program: Program, kept: Sequence[Parts], measure: Measure) -> list[Any]:
    """What every average asks of its scales; None without scales."""
    return [
        measure(magnitudes(parts, storage)) if storage.has_scales else None
        for parts, storage in zip(kept, program.writes, strict=True)
    ]


def encode_all(
    program: Program,
    kept: Sequence[Parts],
    measured: Sequence[Any],
    hashes: Sequence[Parts],
    measure: Measure,
) -> tuple[list[Parts], list[jax.Array | None]]:
    """Parts (int32) of every average's codes, and its scales, wide.

    Args:
      program: what to compute.
      kept: parts of every average.
      measured: what `measure_all` returned.
      hashes: parts of the random words (uint32).
      measure: the largest of a block's integers over all parts, to broadcast against a part.
    """
    codes, scales = [], []
    for j, (parts, storage) in enumerate(zip(kept, program.writes, strict=True)):
        bits = [
            half_word(hashes[j // 2][i], j) if storage.stochastic else None
            for i in range(len(parts))
        ]
        scale = None
        if storage.has_scales:
            parts, scale = encode_scaled(
                parts, storage, bits, measured[j], measure, lambda scale: scale
            )
        else:
            parts = [encode_unscaled(x, storage, b) for x, b in zip(parts, bits, strict=True)]
        codes.append(parts)
        scales.append(scale)
    return codes, scales


def run_elements(
    program: Program, scalars: Scalars, piece: Piece, hashes: Sequence[Parts], measure: Measure
) -> tuple[list[Parts], list[Parts], list[jax.Array | None]]:
    """All of it: parts of the outputs, parts of the codes, and scales."""
    fresh = advance(program, scalars, piece)
    outputs = emit(program, scalars, piece.dense, fresh)
    kept = keep(program, scalars, fresh)
    measured = measure_all(program, kept, measure)
    return outputs, *encode_all(program, kept, measured, hashes, measure)


def _part(operands: Sequence[Parts], i: int) -> list[jax.Array]:
    return [parts[i].astype(jnp.float32) for parts in operands]


def _decode(codes: jax.Array, scale: jax.Array | None, storage) -> jax.Array:
    if scale is None:
        return decode_unscaled(codes, storage)
    return decode_scaled(codes, scale_number(scale), storage)
