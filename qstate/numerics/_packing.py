"""Two 4-bit codes a byte: the halves of a block share bytes.

Byte ``i`` of a block of ``length`` codes holds code ``i`` in its low bits and code
``i + ceil(length / 2)`` in its high bits. Halves, not even and odd places: they are plain slices,
which every accelerator's compiler takes. A block of odd length leaves the last byte's high bits 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from qstate.numerics._blocks import join_blocks, split_blocks


def packed_extent(extent: int, length: int) -> int:
    """Bytes along an axis of ``extent`` codes in blocks of ``length``."""
    whole, rest = divmod(extent, length)
    return whole * -(-length // 2) + -(-rest // 2)


def pack(codes: jax.Array, axis: int, length: int) -> jax.Array:
    """4-bit codes (uint8, below 16) to bytes, two a byte along ``axis`` in blocks of ``length``."""
    extent = codes.shape[axis]
    head = extent - extent % length
    return jnp.concatenate(
        [
            _pack_blocks(lax.slice_in_dim(codes, 0, head, axis=axis), axis, length),
            _pack_blocks(lax.slice_in_dim(codes, head, extent, axis=axis), axis, extent - head),
        ],
        axis=axis,
    )


def unpack(packed: jax.Array, axis: int, length: int, extent: int) -> jax.Array:
    """The inverse of `pack`; ``extent`` is the number of codes along ``axis``."""
    head = extent - extent % length
    cut, end = packed_extent(head, length), packed.shape[axis]
    return jnp.concatenate(
        [
            _unpack_blocks(lax.slice_in_dim(packed, 0, cut, axis=axis), axis, length),
            _unpack_blocks(lax.slice_in_dim(packed, cut, end, axis=axis), axis, extent - head),
        ],
        axis=axis,
    )


def _pack_blocks(codes: jax.Array, axis: int, length: int) -> jax.Array:
    if length == 0:
        return codes
    rows = split_blocks(codes, axis, length)
    half = -(-length // 2)
    low = lax.slice_in_dim(rows, 0, half, axis=axis + 1)
    high = lax.slice_in_dim(rows, half, length, axis=axis + 1)
    if length % 2:
        high = jnp.pad(high, [(0, 1 if i == axis + 1 else 0) for i in range(rows.ndim)])
    return join_blocks(low | (high << 4), axis, rows.shape[axis] * half)


def _unpack_blocks(packed: jax.Array, axis: int, length: int) -> jax.Array:
    if length == 0:
        return packed
    rows = split_blocks(packed, axis, -(-length // 2))
    codes = jnp.concatenate([rows & 0xF, rows >> 4], axis=axis + 1)
    codes = lax.slice_in_dim(codes, 0, length, axis=axis + 1)
    return join_blocks(codes, axis, rows.shape[axis] * length)
