"""Codebooks: any short list of numbers, and the dynamic maps of 8-bit and 4-bit optimizers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qstate.numerics._format import Format, codes_an_octave


@dataclasses.dataclass(frozen=True)
class Codebook(Format):
    """A list of numbers; a code is a place in the list.

    Args:
      name: name of the format.
      values: the numbers in rising order, a power of two of them.
      zero: see `Format`.

    Example:
      >>> from qstate.numerics import Codebook
      >>> Codebook("thirds", (0.25, 0.5, 0.75, 1.0)).bits
      2
    """

    name: str
    values: tuple[float, ...]
    zero: bool = True

    def __post_init__(self):
        count = len(self.values)
        if count < 2 or count & (count - 1) or count > 256:
            raise ValueError(f"a codebook has 2 to 256 values, a power of two; got {count}")
        if any(b <= a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError("a codebook's values must rise strictly")

    def __hash__(self):
        return hash((self.name, self.zero, len(self.values)))  # the values are long

    @property
    def bits(self) -> int:
        return len(self.values).bit_length() - 1

    @property
    def signed(self) -> bool:
        return self.values[0] < 0

    @property
    def top(self) -> float:
        return self.values[-1]

    @property
    def bottom(self) -> float:
        return min(self.values[0], 0.0)

    @property
    def epsilon(self) -> float:
        return codes_an_octave(self.grid(), self.top) ** -1

    @property
    def holds_nan(self) -> bool:
        return False

    def grid(self) -> np.ndarray:
        return np.array(self.values)

    def locate(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A float's leading bits name a bucket that has one number of the list inside it at most.
        starts, shift, base = _buckets(self.values)
        bits = lax.bitcast_convert_type(y, jnp.int32)
        bucket = jnp.clip(((bits & 0x7FFFFFFF) >> shift) - base, 0, starts.shape[1] - 1)
        side = jnp.where(bits < 0, starts.shape[1], 0)
        start = _look_up(starts.reshape(-1), side + bucket)
        last = len(self.values) - 2
        passed = (y >= self.value_at(start + 1)).astype(jnp.int32)
        index = jnp.minimum(start + passed, last)
        below, above = self.value_at(index), self.value_at(index + 1)
        return index, jnp.clip((y - below) / (above - below), 0, 1)

    def nonzero(self, index: jax.Array, live: jax.Array) -> jax.Array:
        if 0.0 in self.values:
            index = jnp.where(index == self.values.index(0.0), index + 1, index)
        return index * live

    def value_at(self, index: jax.Array) -> jax.Array:
        return _look_up(np.array(self.values, np.float32), index)

    def code(self, index: jax.Array, y: jax.Array) -> jax.Array:
        del y  # the sign is part of the place in the list
        return index

    def value(self, code: jax.Array, factor: float = 1.0, *, finite: bool = False) -> jax.Array:
        del finite  # all are
        return _look_up(np.array(self.values, np.float32) * np.float32(factor), code)


def dynamic_map(decades: int, bits: int, signed: bool) -> tuple[float, ...]:
    """The dynamic map: a decade's exponent in unary, the rest of the bits spaced evenly within it.

    Decade i of ``decades`` (from the smallest) has ``2**i`` numbers a sign (twice as many if
    unsigned): midpoints of an even division of [0.1, 1], times 10^(i + 1 - decades). Zero and 1.0
    complete the list.

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022
    """
    values = [0.0, 1.0]
    for i in range(decades):
        count = 2 ** (i + bits - 1 - decades + (0 if signed else 1))
        edges = np.linspace(0.1, 1.0, count + 1)
        middles = 10.0 ** (i + 1 - decades) * (edges[:-1] + edges[1:]) / 2
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return tuple(sorted(values))


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


@functools.cache
def _buckets(values: tuple[float, ...]) -> tuple[np.ndarray, int, int]:
    """Buckets of float32 by leading bits, fine enough that none has two of the values inside.

    Returns:
      For both signs and every bucket the place of the last value at or below all of it (int32,
      ``(2, buckets)``); by how much to shift a magnitude's bits; what to subtract then.
    """
    grid = np.array(values, np.float32)
    sizes = np.abs(grid[grid != 0])
    for shift in range(23, 0, -1):
        base = (sizes.min().view(np.int32) >> shift) - 1
        top = (sizes.max().view(np.int32) >> shift) + 1
        edges = (np.arange(base, top + 2, dtype=np.int32) << shift).view(np.float32)
        edges[0] = 0  # the first bucket reaches down to zero
        upwards = np.searchsorted(grid, edges, side="right") - 1
        downwards = np.searchsorted(grid, -edges, side="right") - 1
        inside = np.searchsorted(grid, edges[1:], side="left") - 1 - upwards[:-1]
        if max(inside.max(), (downwards[:-1] - downwards[1:]).max()) <= 1:
            starts = np.stack([upwards[:-1], downwards[1:]])
            return np.clip(starts, 0, len(grid) - 2).astype(np.int32), shift, int(base)
    raise ValueError("two values of the codebook are the same in float32")
