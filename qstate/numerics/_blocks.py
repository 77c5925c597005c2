"""Which elements share a block: neighbours along one axis, and whole short axes behind it.

A block never flattens an array, so codes and scales keep the array's rank and its partition. While
they are worked on, blocks have an axis of their own: ``(..., n, ...)`` becomes *rows*,
``(..., blocks, length, ...)``.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_FOLDS = 8


class Blocks(NamedTuple):
    """How an array is cut into blocks."""

    axis: int  # the axis that is cut
    length: int  # a block's length along it
    extent: int  # the axis' own length
    behind: int  # number of axes behind it, which a block spans whole

    @property
    def count(self) -> int:
        """Blocks along the axis, the last one perhaps not full."""
        return -(-self.extent // self.length)

    def split(self, x: jax.Array) -> jax.Array:
        """An array as rows, the last block filled up with zeros."""
        missing = self.count * self.length - self.extent
        if missing:
            x = jnp.pad(x, [(0, missing if i == self.axis else 0) for i in range(x.ndim)])
        before, after = x.shape[: self.axis], x.shape[self.axis + 1 :]
        return x.reshape(*before, self.count, self.length, *after)

    def join(self, rows: jax.Array) -> jax.Array:
        """Rows as an array, the filling of the last block cut off."""
        before, after = rows.shape[: self.axis], rows.shape[self.axis + 2 :]
        x = rows.reshape(*before, self.count * self.length, *after)
        return lax.slice_in_dim(x, 0, self.extent, axis=self.axis)

    def maximum(self, rows: jax.Array) -> jax.Array:
        """Every block's maximum, of the array's rank: blocks along ``axis``, 1 behind it.

        Of integers that are not negative, such as the bits of floats.
        """
        axes = tuple(range(self.axis + 1, rows.ndim))
        numbers = (*rows.shape[: self.axis], self.count, *(1,) * self.behind)
        if not self.behind and self.length % _FOLDS == 0:
            # Parts of a block over each other, and the reduction over what is left: on CPUs a
            # reduction over the last axis alone is no vector code.
            parts = rows.reshape(*rows.shape[:-1], _FOLDS, self.length // _FOLDS)
            rows = functools.reduce(jnp.maximum, (parts[..., i, :] for i in range(_FOLDS)))
        return jnp.max(rows, axis=axes, initial=0).reshape(numbers)

    def spread(self, numbers: jax.Array) -> jax.Array:
        """One number a block, of the array's rank, in a shape that broadcasts against rows."""
        return jnp.expand_dims(numbers, self.axis + 1)


def block_layout(shape: tuple[int, ...], size: int) -> Blocks:
    """Cuts an array into blocks of at most ``size`` elements.

    The last axis is cut, unless two of its rows fit into a block: then a block spans the whole axis
    and the axis before is cut. A block's length is even where there is more than one block, so that
    4-bit codes pack in pairs.

    Example:
      >>> block_layout((16, 4096), 128)
      Blocks(axis=1, length=128, extent=4096, behind=0)
      >>> block_layout((4096, 16), 128)
      Blocks(axis=0, length=8, extent=4096, behind=1)
    """
    axis, elements = len(shape) - 1, 1
    while axis > 0 and 2 * elements * max(shape[axis], 1) <= size:
        elements *= max(shape[axis], 1)
        axis -= 1
    extent, length = max(shape[axis], 1), size // elements
    length = min(length - length % 2, extent) if length < extent else extent
    return Blocks(axis, length, shape[axis], len(shape) - 1 - axis)
