"""Codebooks: any short list of numbers, and the dynamic maps of 8-bit and 4-bit optimizers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

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
        table = jnp.asarray(self.values, jnp.float32)
        above = jnp.searchsorted(table, y, side="right", method="scan_unrolled")
        index = jnp.clip(above.astype(jnp.int32) - 1, 0, len(self.values) - 2)
        below = table[index]
        return index, jnp.clip((y - below) / (table[index + 1] - below), 0, 1)

    def nonzero(self, index: jax.Array) -> jax.Array:
        if 0.0 not in self.values:
            return index
        return jnp.where(index == self.values.index(0.0), index + 1, index)

    def value_at(self, index: jax.Array) -> jax.Array:
        return jnp.asarray(self.values, jnp.float32)[index]

    def code(self, index: jax.Array, y: jax.Array) -> jax.Array:
        del y  # the sign is part of the place in the list
        return index.astype(self.dtype)

    def value(self, code: jax.Array) -> jax.Array:
        return self.value_at(code.astype(jnp.int32))


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
