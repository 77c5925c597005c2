"""How values are mapped onto a grid: no scale, one a tensor, a block, or a row and column.

A scaling measures an array's largest magnitudes (`measure`), says what is stored of them and of
what was stored before (`remember`), and spreads that over the elements (`spread`). Scales keep the
array's rank. A scaling also names what has to agree for its scales to be read (`layout`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qstate.numerics._blocks import Blocks

DEFAULT_BLOCK = 128
SCALE_FORMATS = ("float32", "bfloat16", "power_of_two")

_LARGEST_BITS = int(np.finfo(np.float32).max.view(np.uint32))


class _Memoryless:
    """A scaling whose scales depend on nothing but the array at hand."""

    def remember(self, measured: Any, previous: Any) -> Any:
        del previous
        return measured


class _WholeTensor(_Memoryless):
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

    layout = ""

    def __str__(self) -> str:
        return "no scale"


@dataclasses.dataclass(frozen=True)
class PerTensor(_WholeTensor):
    """One float32 scale a tensor: the largest magnitude lands on the format's largest number.

    Takes a reduction over the tensor, so one small collective where the tensor is sharded.
    """

    layout = "pertensor"

    def __str__(self) -> str:
        return "per tensor"


@dataclasses.dataclass(frozen=True)
class Delayed(_WholeTensor):
    r"""One float32 scale a tensor, from the largest magnitudes that the tensor had before.

    With :math:`a_t` the largest magnitude of the tensor when it is stored for the t-th time,

    .. math::
       s_t = 2^{\text{margin}} \max(a_{t-1}, \dots, a_{t-\text{history}})

    lands on the format's largest number; where nothing was seen before,
    :math:`s_t = 2^{\text{margin}} a_t`. A tensor that outgrows its scale saturates once:
    the next time its magnitude is in the history. One that shrinks is on a coarser grid than need
    be until its large magnitudes have left the history. In the domain ``"sqrt"`` magnitudes are
    those of the roots.

    What is stored is one array, the scale in use and behind it the history, the most recent first:
    ``encode`` takes it as ``previous`` the next time, and optimizers pass it on. A tensor of zeros
    has a scale of 0 and clears the history, so that after a hard reset an average starts from its
    own magnitude. One with NaN or infinity reads back NaN and leaves the history as it was.

    Takes a reduction over the tensor, so one small collective where the tensor is sharded.

    Args:
      history: how many of the last magnitudes count, 1 or more.
      margin: powers of two left free above the largest of them, 0 or more. An average that starts
        from zero doubles in its second step: 1 leaves room for that.

    Raises:
      ValueError: for a history or margin that is no such number.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> storage = qstate.Storage(qstate.E4M3, qstate.Delayed(4))
      >>> _, scales = qstate.numerics.encode(jnp.array([1.0, -8.0]), storage)
      >>> codes, scales = qstate.numerics.encode(jnp.array([1.0, 9.0]), storage, previous=scales)
      >>> scales.tolist()
      [8.0, 9.0, 8.0, 0.0, 0.0]
      >>> qstate.numerics.decode(codes, scales, storage, (2,)).tolist()
      [1.0, 8.0]

    References:
      NVIDIA, `Transformer Engine, DelayedScaling
      <https://nvidia.github.io/TransformerEngine/api/common.html>`_
    """

    history: int = 16
    margin: int = 0

    def __post_init__(self):
        for name, least in (("history", 1), ("margin", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer, {least} or more; got {value!r}")

    @property
    def layout(self) -> str:
        return f"delayed{self.history}"

    def __str__(self) -> str:
        margin = f" with margin {self.margin}" if self.margin else ""
        return f"delayed over {self.history}{margin}"

    def remember(self, measured: jax.Array, previous: Any) -> jax.Array:
        shape = (*measured.shape[:-1], 1 + self.history)
        if previous is None:
            previous = jnp.zeros(shape, jnp.float32)
        elif jnp.shape(previous) != shape:
            raise ValueError(
                f"previous scales of shape {jnp.shape(previous)} do not fit {self!r}, which keeps "
                f"{shape} here: pass the scales that encode returned for the same storage and rank"
            )
        history = jnp.asarray(previous, jnp.float32)[..., 1:]
        largest = jnp.max(history, axis=-1, keepdims=True)
        raised = _times_power_of_two(jnp.where(largest > 0, largest, measured), self.margin)
        # Zero and NaN are scales themselves. NaN never gets into the history: it would stay.
        scale = jnp.where(measured > 0, raised, measured)
        seen = jnp.concatenate([measured, history[..., :-1]], axis=-1)
        seen = jnp.where(measured > 0, seen, jnp.where(measured == 0, 0, history))
        return jnp.concatenate([scale, seen], axis=-1)

    def spread(self, scales: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.spread(scales[..., :1])


@dataclasses.dataclass(frozen=True)
class Block(_Memoryless):
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

    @property
    def layout(self) -> str:
        return f"block{self.size}_{self.scale}"

    def __str__(self) -> str:
        return f"block {self.size}" + ("" if self.scale == "float32" else f" {self.scale}")

    def measure(self, rows: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.maximum(rows)

    def spread(self, scales: jax.Array, blocks: Blocks) -> jax.Array:
        return blocks.spread(scales)


@dataclasses.dataclass(frozen=True)
class Rank1(_Memoryless):
    """One float32 scale for every index of every axis; an element's is the smallest of its own.

    Made for second moments, whose large values line up in rows and columns. An array of one axis
    gets one scale. Takes reductions over all axes, so small collectives where the array is sharded.

    References:
      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023
    """

    block = DEFAULT_BLOCK
    scale = "float32"
    layout = "rank1"

    def __str__(self) -> str:
        return "rank-1"

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


Scaling = NoScale | PerTensor | Delayed | Block | Rank1


def _times_power_of_two(scale: jax.Array, exponent: int) -> jax.Array:
    """Normal float32 times ``2^exponent``, at most the largest finite float32; exact below it."""
    # By the bits: as a float, a large power of two would be infinite itself.
    bits = lax.bitcast_convert_type(scale, jnp.uint32) + (min(exponent, 255) << 23)
    return lax.bitcast_convert_type(jnp.minimum(bits, _LARGEST_BITS), jnp.float32)
