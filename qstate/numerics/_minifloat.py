"""Minifloats: sign, exponent and mantissa of any width, by float32's own bit pattern."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qstate.numerics._format import Format, codes_an_octave

_F32_MANTISSA = 23
_F32_BIAS = 127
_F32_EXPONENT_BITS = 8


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

    def nonzero(self, index: jax.Array) -> jax.Array:
        return jnp.maximum(index, 1)

    def value_at(self, index: jax.Array, factor: float = 1.0) -> jax.Array:
        dropped = _F32_MANTISSA - self.mantissa_bits
        if self.exponent_bits == _F32_EXPONENT_BITS:
            return lax.bitcast_convert_type(index << dropped, jnp.float32)
        field = index >> self.mantissa_bits
        mantissa = index & ((1 << self.mantissa_bits) - 1)
        bits = ((field + (_F32_BIAS - self._bias)) << _F32_MANTISSA) | (mantissa << dropped)
        normal = lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32(factor)
        unit = 2.0 ** (self._lowest_exponent - self.mantissa_bits)
        subnormal = mantissa.astype(jnp.float32) * jnp.float32(unit * factor)
        number = jnp.where(field == 0, subnormal, normal)
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
        if self.signed:
            negative = lax.bitcast_convert_type(y, jnp.uint32) >> 31  # also of -0.0
            index = index.astype(jnp.uint32) | (negative << (self.bits - 1))
        if self.native is None:
            return index.astype(self.dtype)
        width = {16: jnp.uint16, 32: jnp.uint32}[self.bits]
        return lax.bitcast_convert_type(index.astype(width), self.dtype)

    def value(self, code: jax.Array, factor: float = 1.0) -> jax.Array:
        if self.native is not None:
            width = {16: jnp.uint16, 32: jnp.uint32}[self.bits]
            code = lax.bitcast_convert_type(code, width)
        index = code.astype(jnp.uint32)
        if not self.signed:
            return self.value_at(index.astype(jnp.int32), factor)
        negative = index >> (self.bits - 1)
        index = (index & ((1 << (self.bits - 1)) - 1)).astype(jnp.int32)
        magnitude = self.value_at(index, factor)
        signed = lax.bitcast_convert_type(magnitude, jnp.uint32) | (negative << 31)
        return lax.bitcast_convert_type(signed, jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """``2.0 ** exponent`` (float32) of int32 exponents in the normal range; exact."""
    return lax.bitcast_convert_type((exponent + _F32_BIAS) << _F32_MANTISSA, jnp.float32)
