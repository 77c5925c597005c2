"""The body of all kernels: what happens to a piece of a leaf, whatever the backend.

A piece comes in *parts* that lie over each other, so that the halves of a block that share bytes
need no shuffling: one part, or the two halves. Every function here works on values, with nothing
but arithmetic on int32, uint32 and float32.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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


def run_elements(
    program: Program, scalars: Scalars, piece: Piece, hashes: Sequence[Parts], measure: Measure
) -> tuple[list[Parts], list[Parts], list[jax.Array | None]]:
    """A program on a piece.

    Args:
      program: what to compute.
      scalars: the program's scalars.
      piece: what is read.
      hashes: parts of the random words (uint32).
      measure: the largest of a block's integers over all parts, to broadcast against a part.

    Returns:
      Parts of every output; parts (int32) of every average's codes; and its scales, wide, None
      without scales.
    """
    old = [
        [_decode(p, scale, storage) for p in parts]
        for parts, scale, storage in zip(*piece[1:], program.reads, strict=True)
    ]
    outputs, kept = [], []  # of every part
    for i in range(len((*piece.dense, *piece.codes)[0])):
        dense = _part(piece.dense, i)
        fresh = program.advance(scalars, dense, _part(old, i))
        emitted = program.emit(scalars, dense, fresh)
        outputs.append([x.astype(t) for x, t in zip(emitted, program.dtypes, strict=True)])
        kept.append(program.keep(scalars, fresh))
    codes, scales = [], []
    for j, storage in enumerate(program.writes):
        parts = [average[j] for average in kept]
        bits = [
            half_word(hashes[j // 2][i], j) if storage.stochastic else None
            for i in range(len(parts))
        ]
        scale = None
        if storage.has_scales:
            measured = measure(magnitudes(parts, storage))
            parts, scale = encode_scaled(parts, storage, bits, measured, measure, lambda s: s)
        else:
            parts = [encode_unscaled(x, storage, b) for x, b in zip(parts, bits, strict=True)]
        codes.append(parts)
        scales.append(scale)
    return [list(parts) for parts in zip(*outputs, strict=True)], codes, scales


def _part(operands: Sequence[Parts], i: int) -> list[jax.Array]:
    return [parts[i].astype(jnp.float32) for parts in operands]


def _decode(codes: jax.Array, scale: jax.Array | None, storage) -> jax.Array:
    if scale is None:
        return decode_unscaled(codes, storage)
    return decode_scaled(codes, scale_number(scale), storage)
