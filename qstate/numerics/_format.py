"""What a grid of stored numbers is: the interface that minifloats and codebooks share.

A `Format` answers a few questions about arrays, and nothing else in the package knows what a format
is made of:

- ``locate(y)``: the last grid point at or below ``y`` and the fraction of the gap above it;
- ``code(index, y)`` and ``value(code)``: a grid point's code, and the number a code stands for;
- ``narrow(code)`` and ``widen(stored)``: codes as they are stored, and as integers to work on.

Rounding, nearest or stochastic, is then the same few lines for every format (see ``_rounding``). A
format that knows a shorter way to the same index overrides ``round``.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qstate.numerics._rounding import round_nearest, round_stochastic


class Format(abc.ABC):
    """A finite set of numbers and their codes.

    Attributes:
      name: lower-case name, as the command line and the tables print it.
      bits: bits a code takes in memory (4-bit codes share a byte).
      signed: whether negative numbers are on the grid.
      zero: whether a number that is not zero may round to zero. Second moments are stored with
        ``zero=False``: they round up to the smallest code instead.
      top, bottom: the largest and the most negative number on the grid.
      epsilon: spacing of the grid at 1.0, relative to 1.0; what the stalling theory asks for.
      dtype: dtype of the codes before packing.
      holds_nan: whether NaN has a code of its own (else a scale has to carry it).
    """

    name: str
    zero: bool

    @property
    @abc.abstractmethod
    def bits(self) -> int: ...

    @property
    @abc.abstractmethod
    def signed(self) -> bool: ...

    @property
    @abc.abstractmethod
    def epsilon(self) -> float: ...

    @property
    @abc.abstractmethod
    def top(self) -> float: ...

    @property
    @abc.abstractmethod
    def bottom(self) -> float: ...

    @property
    @abc.abstractmethod
    def holds_nan(self) -> bool: ...

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16)

    def without_zero(self) -> "Format":
        """The same grid, on which a number that is not zero never rounds to zero."""
        return dataclasses.replace(self, zero=False)  # pyright: ignore[reportArgumentType]

    @abc.abstractmethod
    def grid(self) -> np.ndarray:
        """Every code's number, in the order of the codes, as float64."""

    @abc.abstractmethod
    def locate(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Index (int32) of the grid point below ``y`` (float32), and the fraction of the gap."""

    def round(self, y: jax.Array, bits: jax.Array | None, factor: float = 1.0) -> jax.Array:
        """Index (int32) of the grid point that ``y * factor`` (float32) rounds to.

        Stochastically by ``bits`` (uint32 below 2^16); to nearest, ties to even, without. The
        factor belongs here: XLA would multiply it into a number that ``y`` was multiplied by.
        """
        index, fraction = self.locate(_times(y, factor))
        if bits is None:
            return round_nearest(index, fraction)
        return round_stochastic(index, fraction, bits)

    def round_root(self, y: jax.Array, bits: jax.Array, factor: float = 1.0) -> jax.Array:
        """As `round`, but so that the square is unbiased; ``y`` is not negative."""
        y = _times(y, factor)
        index, fraction = self.locate(y)
        # Linear in the square: (y^2 - low^2) / (high^2 - low^2).
        low, high = self.value_at(index), self.value_at(index + 1)
        return round_stochastic(index, fraction * ((y + low) / (high + low)), bits)

    @abc.abstractmethod
    def nonzero(self, index: jax.Array, live: jax.Array) -> jax.Array:
        """``index``, moved up by one where it stands for zero and ``live`` is 1 (int32).

        Where ``live`` is 0 so is the code; ``index`` is that of zero there.
        """

    @abc.abstractmethod
    def value_at(self, index: jax.Array) -> jax.Array:
        """The number (float32) at an index that ``locate`` gave, or one above it."""

    @abc.abstractmethod
    def code(self, index: jax.Array, y: jax.Array) -> jax.Array:
        """The code (int32) of a rounded index; ``y`` gives the sign."""

    @abc.abstractmethod
    def value(self, code: jax.Array, factor: float = 1.0, *, finite: bool = False) -> jax.Array:
        """The number (float32) that a code (int32) stands for, times a constant, rounded once.

        The constant belongs here: XLA would multiply one that follows into the scale after it. With
        ``finite`` no code is looked at as NaN or infinity: where a scale carries them, none is.
        """

    @property
    def fits_half(self) -> bool:
        """Whether `value_by_half` is there."""
        return False

    def value_by_half(self, stored: jax.Array, factor: jax.Array) -> jax.Array:
        """`value` of finite codes as they are stored, by way of float16's bits.

        CPUs widen those in one instruction.
        """
        raise NotImplementedError

    def narrow(self, code: jax.Array) -> jax.Array:
        """Codes as they are stored (``dtype``), one an element."""
        return code.astype(self.dtype)

    def widen(self, stored: jax.Array) -> jax.Array:
        """The inverse of `narrow`, int32."""
        return stored.astype(jnp.int32)

    def __str__(self) -> str:
        return self.name if self.zero else f"{self.name} without zero"


def _times(y: jax.Array, factor: float) -> jax.Array:
    """``y * factor``, the select in between against XLA (see `Format.round`)."""
    return y if factor == 1 else jnp.where(y != 0, y, 0) * jnp.float32(factor)


def codes_an_octave(grid: np.ndarray, top: float) -> float:
    """How many codes an octave has near the top of a grid whose relative spacing is not constant.

    The mean over the three octaves below the top, where an average scaled by its block's maximum
    lives. A minifloat has ``1 / epsilon`` in every octave of normal numbers.
    """
    octaves = 3
    return float(np.sum((grid > top / 2**octaves) & (grid <= top))) / octaves
