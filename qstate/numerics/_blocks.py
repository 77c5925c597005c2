"""Which elements share a block: neighbours along one axis, and whole short axes behind it.

A block never flattens an array, so codes and scales keep the array's rank and its partition.
"""

import jax
import jax.numpy as jnp
from jax import lax


def block_layout(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """The axis that is cut into blocks of at most ``size`` elements, and a block's length along it.

    That is the last axis, unless two of its rows fit into a block: then the block spans the whole
    axis and is cut along the axis before. The length is even where there is more than one block, so
    that 4-bit codes pack in pairs.

    Example:
      >>> block_layout((16, 4096), 128), block_layout((4096, 16), 128)
      ((1, 128), (0, 8))
    """
    axis, behind = len(shape) - 1, 1
    while axis > 0 and 2 * behind * max(shape[axis], 1) <= size:
        behind *= max(shape[axis], 1)
        axis -= 1
    extent = max(shape[axis], 1)
    length = size // behind
    return axis, min(length - length % 2, extent) if length < extent else extent


def split_blocks(x: jax.Array, axis: int, length: int) -> jax.Array:
    """``(..., n, ...) -> (..., blocks, length, ...)``, the last block filled up with zeros."""
    blocks = -(-x.shape[axis] // length)
    missing = blocks * length - x.shape[axis]
    if missing:
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], blocks, length, *x.shape[axis + 1 :])


def join_blocks(x: jax.Array, axis: int, extent: int) -> jax.Array:
    """``(..., blocks, length, ...) -> (..., extent, ...)``, the filling cut off."""
    merged = x.shape[axis] * x.shape[axis + 1]
    x = x.reshape(*x.shape[:axis], merged, *x.shape[axis + 2 :])
    return x if merged == extent else lax.slice_in_dim(x, 0, extent, axis=axis)


def block_maximum(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Maximum of every block, with the rank of ``x``: blocks along ``axis``, 1 behind it."""
    rows = split_blocks(x, axis, length)
    reduced = jnp.max(rows, axis=tuple(range(axis + 1, rows.ndim)), initial=0)
    return reduced.reshape(*reduced.shape, *(1,) * (x.ndim - axis - 1))


def spread_blocks(scales: jax.Array, shape: tuple[int, ...], axis: int, length: int) -> jax.Array:
    """The inverse of `block_maximum`'s layout: every element gets its block's number."""
    rows = scales.reshape(*scales.shape[: axis + 1], 1, *(1,) * (len(shape) - axis - 1))
    rows = jnp.broadcast_to(rows, (*scales.shape[: axis + 1], length, *shape[axis + 1 :]))
    return join_blocks(rows, axis, shape[axis])
