"""How values are mapped onto a grid: no scale, one a tensor, a block, or a row and column.

A scaling measures an array's largest magnitudes (`measure`), and spreads what was measured back
over the elements (`spread`). Scales keep the array's rank.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qstate.numerics._blocks import Blocks

DEFAULT_BLOCK = 128
SCALE_FORMATS = ("float32", "bfloat16", "power_of_two")


class _WholeTensor:
    block = DEFAULT_BLOCK
    scale = "float32"

    def measure(self, rows: jax.Array, blocks: Blocks) -> jax.Array:
        return jnp.max(rows, initial=0).reshape((1,) * (rows.ndim - 1))

    def spread(self, scales: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.spread(scales)


@dataclasses.dataclass(frozen=True)
class NoScale(_WholeTensor):
    """The format's own grid, as it is.

    No scale is stored, unless the format cannot hold NaN: then one float32 a tensor does, 1.0 or
    NaN (0.0 where all of the tensor is zero), and takes a reduction over the tensor.
    """


@dataclasses.dataclass(frozen=True)
class PerTensor(_WholeTensor):
    """One float32 scale a tensor: the largest magnitude lands on the format's largest number.

    Takes a reduction over the tensor, so one small collective where the tensor is sharded.
    """


@dataclasses.dataclass(frozen=True)
class Block:
    """A scale for every ``size`` neighbours along the last axis.

    Where the last axis is short a block spans it whole and is cut along the axis before (see
    `_blocks`). A block's largest magnitude lands on the format's largest number.

    Args:
      size: elements a block, an even number.
      scale: how a scale is stored: ``"float32"`` (4 bytes, the exact maximum), ``"bfloat16"`` (2
        bytes) or ``"power_of_two"`` (1 byte; minifloats only).

    Example:
      >>> import qstate
      >>> qstate.Block(128, scale="bfloat16").size
      128
    """

    size: int = DEFAULT_BLOCK
    scale: str = "float32"

    def __post_init__(self):
        if not isinstance(self.size, int) or self.size < 2 or self.size % 2:
            raise ValueError(
                f"a block has an even number of elements, 2 or more; got {self.size!r}"
            )
        if self.scale not in SCALE_FORMATS:
            raise ValueError(f"scale must be one of {SCALE_FORMATS}, got {self.scale!r}")

    @property
    def block(self) -> int:
        return self.size

    def measure(self, rows: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.maximum(rows)

    def spread(self, scales: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.spread(scales)


@dataclasses.dataclass(frozen=True)
class Rank1:
    """One float32 scale for every index of every axis; an element's is the smallest of its own.

    Made for second moments, whose large values line up in rows and columns. An array of one axis
    gets one scale. Takes reductions over all axes, so small collectives where the array is sharded.

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023
    """

    block = DEFAULT_BLOCK
    scale = "float32"

    def measure(self, rows: jax.Array, blocks: Blocks) -> tuple[jax.Array, ...]:
        x = blocks.join(rows)
        if x.ndim == 1:
            return (jnp.max(x, keepdims=True, initial=0),)
        return tuple(
            jnp.max(x, axis=tuple(j for j in range(x.ndim) if j != i), keepdims=True, initial=0)
            for i in range(x.ndim)
        )

    def spread(self, scales: tuple[jax.Array, ...], blocks: Blocks) -> jax.Array:
        # A bad element makes NaN of its row's scale and of its column's. Only where all of an
        # element's scales are NaN is the element bad.
        finite = [jnp.where(jnp.isnan(s), jnp.inf, s) for s in scales]
        smallest = functools.reduce(jnp.minimum, finite)
        smallest = jnp.where(jnp.isinf(smallest), jnp.nan, smallest).astype(jnp.float32)
        if smallest.ndim == 1:
            return smallest
        return blocks.split(smallest)


Scaling = NoScale | PerTensor | Block | Rank1
