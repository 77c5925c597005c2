"""Two 4-bit codes a byte: the halves of a block share bytes.

Byte ``i`` of a block of ``length`` codes holds code ``i`` in its low bits and code
``i + ceil(length / 2)`` in its high bits. Halves, not even and odd places: they are plain slices,
which every accelerator's compiler takes. A block of odd length leaves the last byte's high bits 0,
and a last block that is not full packs as the shorter block it is.
"""

import jax
import jax.numpy as jnp
from jax import lax

from qstate.numerics._blocks import Blocks


def pack(rows: jax.Array, blocks: Blocks) -> jax.Array:
    """4-bit codes (uint8 below 16, as rows) to an array of bytes, half as long along the axis."""
    axis = blocks.axis
    whole, rest = divmod(blocks.extent, blocks.length)
    if not rest:
        return _pack_rows(rows, axis)
    tail = lax.slice_in_dim(rows, whole, None, axis=axis)
    tail = _pack_rows(lax.slice_in_dim(tail, 0, rest, axis=axis + 1), axis)
    head = _pack_rows(lax.slice_in_dim(rows, 0, whole, axis=axis), axis)
    return jnp.concatenate([head, tail], axis=axis)


def unpack(packed: jax.Array, blocks: Blocks) -> jax.Array:
    """The inverse of `pack`: rows of codes."""
    axis = blocks.axis
    whole, rest = divmod(blocks.extent, blocks.length)
    if not rest:
        return _unpack_rows(packed, axis, whole, blocks.length)
    cut = whole * -(-blocks.length // 2)
    head = lax.slice_in_dim(packed, 0, cut, axis=axis)
    tail = _unpack_rows(lax.slice_in_dim(packed, cut, None, axis=axis), axis, 1, rest)
    filling = [(0, blocks.length - rest if i == axis + 1 else 0) for i in range(tail.ndim)]
    head = _unpack_rows(head, axis, whole, blocks.length)
    return jnp.concatenate([head, jnp.pad(tail, filling)], axis=axis)


def _pack_rows(rows: jax.Array, axis: int) -> jax.Array:
    length = rows.shape[axis + 1]
    half = -(-length // 2)
    low = lax.slice_in_dim(rows, 0, half, axis=axis + 1)
    high = lax.slice_in_dim(rows, half, length, axis=axis + 1)
    if length % 2:
        high = jnp.pad(high, [(0, 1 if i == axis + 1 else 0) for i in range(rows.ndim)])
    packed = low | (high << 4)
    before, after = rows.shape[:axis], rows.shape[axis + 2 :]
    return packed.reshape(*before, rows.shape[axis] * half, *after)


def _unpack_rows(packed: jax.Array, axis: int, count: int, length: int) -> jax.Array:
    before, after = packed.shape[:axis], packed.shape[axis + 1 :]
    half = -(-length // 2)
    rows = packed.reshape(*before, count, 1, half, *after)
    # (..., count, 1, half, ...) >> (0, 4): a broadcast, where a concatenation would be a copy.
    shifts = lax.broadcasted_iota(jnp.uint8, (2, *(1,) * (1 + len(after))), 0) * 4
    codes = ((rows >> shifts) & 0xF).reshape(*before, count, 2 * half, *after)
    return lax.slice_in_dim(codes, 0, length, axis=axis + 1)
