"""Minifloats: sign, exponent and mantissa of any width, by float32's own bit pattern."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qstate.numerics._format import Format, codes_an_octave
from qstate.numerics._rounding import RANDOM_BITS, offset, threshold

_F32_MANTISSA = 23
_F32_BIAS = 127
_F32_EXPONENT_BITS = 8
_F16_MANTISSA = 10
_F16_EXPONENT_BITS = 5
_F16_BIAS = 15


@dataclasses.dataclass(frozen=True)
class Minifloat(Format):
    """Sign, exponent and mantissa fields of any width, with subnormals.

    Codes are sign-magnitude: the sign bit, then an index that counts the non-negative numbers
    upwards, so that the next number up is the next index. With no exponent bits the grid is evenly
    spaced, which is how ``INT8`` is spelled.

    Args:
      name: name of the format.
      exponent_bits: width of the exponent field, 0 to 8.
      mantissa_bits: width of the mantissa field.
      bias: exponent bias; ``2**(exponent_bits-1) - 1`` if None.
      signed: whether there is a sign bit.
      specials: ``"none"``; ``"nan"``, the all-ones code is NaN (the "fn" formats); or ``"ieee"``,
        the all-ones exponent holds infinity and NaN.
      zero: see `Format`.
      native: name of the JAX dtype that holds the codes where one exists (16 and 32 bits).

    Example:
      >>> from qstate.numerics import Minifloat
      >>> Minifloat("e3m2", 3, 2).top
      28.0

    References:
      Micikevicius et al., `FP8 Formats for Deep Learning <https://arxiv.org/abs/2209.05433>`_, 2022
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    signed: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    specials: str = "none"
    zero: bool = True
    native: str | None = None

    def __post_init__(self):
        if not 0 <= self.exponent_bits <= _F32_EXPONENT_BITS:
            raise ValueError(f"exponent_bits must be 0 to 8, got {self.exponent_bits}")
        if not 0 <= self.mantissa_bits <= _F32_MANTISSA:
            raise ValueError(f"mantissa_bits must be 0 to 23, got {self.mantissa_bits}")
        if self.specials not in ("none", "nan", "ieee"):
            raise ValueError(f'specials must be "none", "nan" or "ieee", got {self.specials!r}')
        if self.bits > 16 and self.native is None:
            raise ValueError(f"{self.name} has {self.bits} bits; a format has 16 at most")
        if self.exponent_bits == _F32_EXPONENT_BITS and self._bias != _F32_BIAS:
            raise ValueError("with 8 exponent bits the bias must be float32's, 127")

    @property
    def _bias(self) -> int:
        if self.bias is not None:
            return self.bias
        return 2 ** (self.exponent_bits - 1) - 1 if self.exponent_bits else 0

    @property
    def _lowest_exponent(self) -> int:
        return 1 - self._bias

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.native)) if self.native else super().dtype

    @property
    def epsilon(self) -> float:
        if self.exponent_bits == 0:
            return codes_an_octave(self.grid(), self.top) ** -1
        return 2.0**-self.mantissa_bits

    @property
    def holds_nan(self) -> bool:
        return self.specials != "none"

    @property
    def top_index(self) -> int:
        """Index of the largest finite number."""
        every = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        return {
            "none": every,
            "nan": every - 1,
            "ieee": every - 2**self.mantissa_bits,
        }[self.specials]

    @property
    def top(self) -> float:
        return self._number(self.top_index)

    @property
    def bottom(self) -> float:
        return -self.top if self.signed else 0.0

    @property
    def half_top_index(self) -> int:
        """Index of the largest number that doubles without passing ``top``."""
        index = self.top_index
        while 2 * self._number(index) > self.top:
            index -= 1
        return index

    def doubled(self, index: jax.Array) -> jax.Array:
        """Index of twice the number at ``index``; exact up to ``half_top_index``."""
        step = 1 << self.mantissa_bits
        return jnp.where(index < step, 2 * index, index + step)

    def _number(self, index: int) -> float:
        field, mantissa = divmod(index, 2**self.mantissa_bits)
        if field:
            mantissa += 2**self.mantissa_bits
        return mantissa * 2.0 ** (max(field, 1) - self._bias - self.mantissa_bits)

    def grid(self) -> np.ndarray:
        magnitudes = []
        for index in range(2 ** (self.exponent_bits + self.mantissa_bits)):
            if index <= self.top_index:
                magnitudes.append(self._number(index))
            elif self.specials == "ieee" and index == self.top_index + 1:
                magnitudes.append(math.inf)
            else:
                magnitudes.append(math.nan)
        magnitudes = np.array(magnitudes)
        return np.concatenate([magnitudes, -magnitudes]) if self.signed else magnitudes

    def locate(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # NaN compares false, so it lands on top: no NaN and no infinity passes this line.
        magnitude = jnp.abs(y) if self.signed else jnp.maximum(y, 0)
        magnitude = jnp.where(magnitude < self.top, magnitude, jnp.float32(self.top))
        bits = lax.bitcast_convert_type(magnitude, jnp.int32)
        dropped = _F32_MANTISSA - self.mantissa_bits
        if self.exponent_bits == _F32_EXPONENT_BITS:
            # float32's own exponents: the index is the leading bits, subnormals included (float
            # arithmetic would flush them to zero).
            index = bits >> dropped
            rest = bits & ((1 << dropped) - 1)
            return index, rest.astype(jnp.float32) * (2.0**-dropped)
        exponent = jnp.maximum((bits >> _F32_MANTISSA) - _F32_BIAS, self._lowest_exponent)
        ulps = magnitude * _power_of_two(self.mantissa_bits - exponent)  # exact
        whole = jnp.floor(ulps)
        index = ((exponent - self._lowest_exponent) << self.mantissa_bits) + whole.astype(jnp.int32)
        return index, ulps - whole

    @property
    def _rounds_by_sums(self) -> bool:
        """Whether float32 has room for a significand of the format and 17 bits more."""
        significand = self.mantissa_bits + (1 if self.exponent_bits else 0)
        return (
            self.mantissa_bits > 0
            and significand + RANDOM_BITS + 1 <= _F32_MANTISSA + 1
            and self._lowest_exponent - self.mantissa_bits > -_F32_BIAS
            and math.log2(self.top) + _F32_MANTISSA - self.mantissa_bits < _F32_BIAS
        )

    def round(self, y: jax.Array, bits: jax.Array | None, factor: float = 1.0) -> jax.Array:
        # No conversion between floats and integers, and no select: those are slow on CPUs.
        dropped = _F32_MANTISSA - self.mantissa_bits
        if self.exponent_bits == _F32_EXPONENT_BITS and dropped >= RANDOM_BITS:
            return _rounded(self._saturated(y, factor), bits, dropped)
        if not self._rounds_by_sums:
            return super().round(y, bits, factor)
        if bits is not None and dropped - RANDOM_BITS > 3:
            return _rounded(self._places(self._saturated(y, factor)), bits, dropped)
        # Added to 1.5 * 2^23 of its own ulps, a number is rounded to a multiple of its ulp, ties to
        # even.
        binade, magnitude = self._binade(y, factor)
        if bits is not None:
            ulps = offset(bits, 2.0**-self.mantissa_bits)
            magnitude += ulps * lax.bitcast_convert_type(binade, jnp.float32)  # an exact product
            # What is below zero rounds to zero either way. Without it XLA would add the anchor to
            # the magnitude first, where both are constants.
            magnitude = jnp.abs(magnitude)
        anchor = binade + ((dropped << _F32_MANTISSA) + (1 << (_F32_MANTISSA - 1)))
        total = magnitude + lax.bitcast_convert_type(anchor, jnp.float32)
        steps = lax.bitcast_convert_type(total, jnp.int32) - anchor
        return steps + self._first_index(binade)

    def _places(self, magnitude: jax.Array) -> jax.Array:
        """A saturated number (its bits) as a place on the grid: the index, and a binary fraction.

        A float32's bits are that already. So are those of subnormal numbers once they are raised by
        the smallest normal number, to where a float32's step is a small part of theirs: 2^-20 at
        most, and to round to it is nothing beside the 2^-16 that random bits are worth.
        """
        raised = lax.bitcast_convert_type(magnitude, jnp.float32) + 2.0**self._lowest_exponent
        raised = lax.bitcast_convert_type(raised, jnp.int32) - (1 << _F32_MANTISSA)
        zero = (self._lowest_exponent - 1 + _F32_BIAS) << _F32_MANTISSA
        return jnp.maximum(magnitude, raised) - zero  # the second one where it is subnormal

    def round_root(self, y: jax.Array, bits: jax.Array, factor: float = 1.0) -> jax.Array:
        if not self._rounds_by_sums:
            return super().round_root(y, bits, factor)
        binade, magnitude = self._binade(y, factor)
        reciprocal = _as_int32((2 * _F32_BIAS + self.mantissa_bits) << _F32_MANTISSA) - binade
        ulps = magnitude * lax.bitcast_convert_type(reciprocal, jnp.float32)  # exact
        whole = jnp.floor(ulps)
        # (ulps^2 - whole^2) / ((whole + 1)^2 - whole^2) > threshold, without a division. Products
        # on the right are exact, so that it does not matter which of them a compiler fuses.
        up = ulps * ulps > whole * whole + threshold(bits) * (2 * whole + 1)
        anchored = lax.bitcast_convert_type(whole + 2.0**_F32_MANTISSA, jnp.int32)
        steps = anchored - ((_F32_BIAS + _F32_MANTISSA) << _F32_MANTISSA)
        return steps + self._first_index(binade) + up.astype(jnp.int32)

    def _saturated(self, y: jax.Array, factor: float) -> jax.Array:
        """The bits (int32) of a magnitude, at most the largest number's."""
        bits = lax.bitcast_convert_type(y, jnp.int32)
        bits = bits & 0x7FFFFFFF if self.signed else jnp.maximum(bits, 0)
        if factor != 1:
            magnitude = lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32(factor)
            bits = lax.bitcast_convert_type(magnitude, jnp.int32)
        return jnp.minimum(bits, int(np.float32(self.top).view(np.int32)))  # NaN too

    def _binade(self, y: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
        """The power of two (float32 as int32) whose ulp a number has, and the saturated number."""
        bits = self._saturated(y, factor)
        lowest = (self._lowest_exponent + _F32_BIAS) << _F32_MANTISSA
        binade = jnp.maximum(bits & 0x7F800000, lowest)
        return binade, lax.bitcast_convert_type(bits, jnp.float32)

    def _first_index(self, binade: jax.Array) -> jax.Array:
        """What to add to a number's count of ulps to get its index."""
        first = (self._lowest_exponent + _F32_BIAS) << self.mantissa_bits
        return (binade >> (_F32_MANTISSA - self.mantissa_bits)) - first

    def nonzero(self, index: jax.Array, live: jax.Array) -> jax.Array:
        return jnp.maximum(index, live)

    def value_at(self, index: jax.Array, factor: float = 1.0, *, finite: bool = False) -> jax.Array:
        dropped = _F32_MANTISSA - self.mantissa_bits
        if self.exponent_bits == _F32_EXPONENT_BITS:
            return lax.bitcast_convert_type(index << dropped, jnp.float32)
        factor = jnp.float32(factor)
        # As if no number were subnormal; those that are lie twice as far below the lowest exponent.
        bits = (index << dropped) + ((_F32_BIAS - self._bias) << _F32_MANTISSA)
        normal = lax.bitcast_convert_type(bits, jnp.float32)
        subnormal = (normal + normal) - jnp.float32(2.0**self._lowest_exponent)
        # Neither is negative, so the smaller float has the smaller bits. Where no sign is set
        # behind it the factor comes first, or XLA would multiply it into a scale behind it.
        both = [normal, subnormal] if self.signed else [normal * factor, subnormal * factor]
        bits = jnp.minimum(*(lax.bitcast_convert_type(x, jnp.int32) for x in both))
        number = lax.bitcast_convert_type(bits, jnp.float32)
        if self.signed:
            number *= factor
        if finite:
            return number
        if self.specials == "ieee":
            infinite = jnp.where(index == self.top_index + 1, jnp.inf, jnp.nan)
            number = jnp.where(index > self.top_index, infinite.astype(jnp.float32), number)
        elif self.specials == "nan":
            number = jnp.where(index > self.top_index, jnp.float32(jnp.nan), number)
        return number

    def special_index(self, x: jax.Array) -> jax.Array:
        """Index of NaN, or of infinity where ``x`` is infinite and the format has it."""
        nan = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        if self.specials == "nan":
            return jnp.full(x.shape, nan, jnp.int32)
        quiet = self.top_index + 1 + (1 << (self.mantissa_bits - 1))
        return jnp.where(jnp.isnan(x), quiet, self.top_index + 1).astype(jnp.int32)

    def code(self, index: jax.Array, y: jax.Array) -> jax.Array:
        if not self.signed:
            return index
        sign = lax.bitcast_convert_type(y, jnp.int32) >> (32 - self.bits)
        return index | (sign & _as_int32(1 << (self.bits - 1)))  # also of -0.0

    def value(self, code: jax.Array, factor: float = 1.0, *, finite: bool = False) -> jax.Array:
        if not self.signed:
            return self.value_at(code, factor, finite=finite)
        negative = (code << (32 - self.bits)) & _as_int32(1 << 31)
        magnitude = self.value_at(code & ((1 << (self.bits - 1)) - 1), factor, finite=finite)
        signed = lax.bitcast_convert_type(magnitude, jnp.int32) | negative
        return lax.bitcast_convert_type(signed, jnp.float32)

    @property
    def fits_half(self) -> bool:
        return (
            self.bits <= 8 and self.exponent_bits <= _F16_EXPONENT_BITS and self.exponent_bits > 0
        )

    def value_by_half(self, stored: jax.Array, factor: jax.Array) -> jax.Array:
        place = self.exponent_bits + _F16_MANTISSA
        if self.signed and self.bits == 8:
            stored = lax.bitcast_convert_type(stored, jnp.int8)  # its sign is copied upwards
        bits = stored.astype(jnp.int16) << (_F16_MANTISSA - self.mantissa_bits)
        if self.signed:
            # The sign moves on to its place: it is copied upwards, and cleared in between.
            if self.bits < 8:
                bits = (bits << (15 - place)) >> (15 - place)
            bits = bits & np.int16((1 << place) - 1 - 2**15)
        number = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        return number * (factor * jnp.float32(2.0 ** (_F16_BIAS - self._bias)))

    def narrow(self, code: jax.Array) -> jax.Array:
        if self.native is None:
            return super().narrow(code)
        return lax.bitcast_convert_type(code.astype(self._unsigned), self.dtype)

    def widen(self, stored: jax.Array) -> jax.Array:
        if self.native is None:
            return super().widen(stored)
        return lax.bitcast_convert_type(stored, self._unsigned).astype(jnp.int32)

    @property
    def _unsigned(self) -> Any:
        return {16: jnp.uint16, 32: jnp.uint32}[self.bits]


def _as_int32(bits: int) -> np.int32:
    return np.uint32(bits).view(np.int32)


def _rounded(places: jax.Array, bits: jax.Array | None, dropped: int) -> jax.Array:
    """Integers less their lowest bits: to the nearest, or up where those and random bits carry."""
    if bits is None:
        return (places + ((1 << (dropped - 1)) - 1) + ((places >> dropped) & 1)) >> dropped
    finer = dropped - RANDOM_BITS
    bits = bits.astype(jnp.int32)
    if finer:
        bits = (bits << finer) | (1 << (finer - 1))
    return (places + bits) >> dropped


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """``2.0 ** exponent`` (float32) of int32 exponents in the normal range; exact."""
    return lax.bitcast_convert_type((exponent + _F32_BIAS) << _F32_MANTISSA, jnp.float32)
