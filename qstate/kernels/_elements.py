"""The body of all kernels: what happens to a piece of a leaf, whatever the backend.

A piece comes in *parts* that lie over each other, so that the halves of a block that share bytes
need no shuffling: one part, or the two halves. Every function here works on values, with nothing
but arithmetic on int32, uint32 and float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qstate.kernels._program import Program, Scalars
from qstate.numerics import (
    decode_scaled,
    decode_unscaled,
    encode_scaled,
    encode_unscaled,
    scale_number,
)

Parts = Sequence[jax.Array]


def run_elements(
    program: Program,
    scalars: Scalars,
    dense: Sequence[Parts],
    codes: Sequence[Parts],
    scales: Sequence[jax.Array | None],
    hashes: Sequence[Parts],
    measure: Callable[[Parts], jax.Array],
    hold: Callable[[Any], Any] = lambda fresh: fresh,
) -> tuple[list[Parts], list[Parts], list[jax.Array | None]]:
    """Runs a program on a piece.

    Args:
      program: what to compute.
      scalars: its scalars.
      dense: parts of every dense operand.
      codes: parts (int32) of every average that is read.
      scales: their scales, wide, in a shape that broadcasts against a part; None without scales.
      hashes: parts of the random words (uint32).
      measure: the largest of a block's integers over all parts, to broadcast against a part.
      hold: called with the new averages of all parts, to put them down before they are used again.

    Returns:
      Parts of every output, parts (int32) of the codes that are written, and their scales, wide.
    """
    count = range(len(dense[0] if dense else codes[0]))
    old = [
        [_decode(p, scale, storage) for p in parts]
        for parts, scale, storage in zip(codes, scales, program.reads, strict=True)
    ]
    fresh = hold([program.advance(scalars, _part(dense, i), _part(old, i)) for i in count])
    emitted = [program.emit(scalars, _part(dense, i), fresh[i]) for i in count]
    outputs = [
        [emitted[i][k].astype(dtype) for i in count] for k, dtype in enumerate(program.dtypes)
    ]
    kept = [program.keep(scalars, fresh[i]) for i in count]
    new_codes, new_scales = [], []
    for j, storage in enumerate(program.writes):
        parts = [kept[i][j] for i in count]
        draws = [_bits(hashes, i, j) if storage.stochastic else None for i in count]
        scale = None
        if storage.has_scales:
            parts, scale = encode_scaled(parts, storage, draws, measure, lambda scale: scale)
        else:
            parts = [encode_unscaled(p, storage, d) for p, d in zip(parts, draws, strict=True)]
        new_codes.append(parts)
        new_scales.append(scale)
    return outputs, new_codes, new_scales


def _part(operands: Sequence[Parts], i: int) -> list[jax.Array]:
    return [parts[i].astype(jnp.float32) for parts in operands]


def _bits(hashes: Sequence[Parts], i: int, j: int) -> jax.Array:
    """16 random bits for average ``j``: the upper or the lower ones of a word."""
    word = hashes[j // 2][i]
    return word & jnp.uint32(0xFFFF) if j % 2 else word >> 16


def _decode(codes: jax.Array, scale: jax.Array | None, storage) -> jax.Array:
    if scale is None:
        return decode_unscaled(codes, storage)
    return decode_scaled(codes, scale_number(scale), storage)
