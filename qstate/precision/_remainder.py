"""A float32 number as a 16-bit one and what that leaves out: `split` and `join`.

Floats of one sign are ordered like their bits. So a magnitude is an integer, its *place*, with 16
more bits than the 16-bit format has; the 16-bit number is the place rounded to a multiple of 2^16,
and the remainder the rest, from -2^15 to 2^15 - 1. For bfloat16 the place is float32's own bits,
and the two halves hold all of them. For float16 the place is that of a float with 5 bits of
exponent and 26 of mantissa, finer than float32 above 2^-17 and in steps of 2^-40 below.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

REMAINDER_BITS = (8, 16)
_DTYPES = {8: jnp.int8, 16: jnp.int16}
_MAGNITUDE = 0x7FFFFFFF
_HALF_A_STEP = 1 << 15
# 2^-14, float16's smallest normal, as float32 bits, and as a place.
_SMALLEST_NORMAL_BITS = 113 << 23
_SMALLEST_NORMAL_PLACE = 1 << 26
_FLOAT16_END = 65520.0  # what rounds to infinity


def split(x: jax.Array, dtype: Any, bits: int) -> tuple[jax.Array, jax.Array]:
    """A number in 16 bits, and a remainder.

    Args:
      x: float32 numbers of any shape.
      dtype: ``bfloat16`` or ``float16``.
      bits: 8 or 16, of the remainder.

    Returns:
      ``(param, remainder)``: ``dtype`` and int8 or int16, of the shape of ``x``.

    Numerics:
      ``param`` is the number that `join` gives back, cast to nearest. With 16 bits beside bfloat16
      an exact tie is cast away from zero: ties to even would take one bit more.

    Example:
      >>> import jax.numpy as jnp
      >>> from qstate.precision import join, split
      >>> weight = jnp.float32(0.1)
      >>> param, remainder = split(weight, jnp.bfloat16, 16)
      >>> float(param), join(param, remainder) == weight
      (0.10009765625, Array(True, dtype=bool))
    """
    place = _place(x, dtype, bits)
    half = _HALF_A_STEP
    if bits == 16 and dtype == jnp.float16:
        # Ties to even: the largest remainder is not that of any other float32 number.
        half += (place >> 16 & 1) - 1
    code = (place + half) >> 16
    sign = (_bits_of(x) >> 31) << 15
    code = jnp.where(jnp.isnan(x), _nan_code(dtype), code | sign).astype(jnp.uint16)
    param = lax.bitcast_convert_type(code, dtype)
    return param, remainder_of(x, param, bits)


def remainder_of(x: jax.Array, param: jax.Array, bits: int) -> jax.Array:
    """What is to be stored beside ``param`` for it to stand for ``x``, as near as that gets.

    Args:
      x: float32 numbers.
      param: 16-bit numbers near ``x``.
      bits: 8 or 16.

    Returns:
      int8 or int16.
    """
    place = _place(x, param.dtype, bits)
    # On the other side of zero the place is negative.
    other_side = _bits_of(x) ^ _bits_of(param.astype(jnp.float32)) < 0
    distance = jnp.where(other_side, -place, place) - (_magnitude_code(param) << 16)
    info = jnp.iinfo(_DTYPES[bits])
    return jnp.clip(distance >> (16 - bits), info.min, info.max).astype(_DTYPES[bits])


def join(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 number that was split.

    Args:
      param: bfloat16 or float16.
      remainder: int8 or int16, of the same shape.

    Returns:
      float32. From 16 bits beside bfloat16 it is the number to the last bit, from 8 bits within
      2^-16 of it.
    """
    missing_bits = 16 - 8 * remainder.dtype.itemsize
    place = (_magnitude_code(param) << 16) + (remainder.astype(jnp.int32) << missing_bits)
    if missing_bits:
        place += jnp.where(remainder == -(1 << 7), _tie_moved_by(param.dtype), 0)
    magnitude = _magnitude_at(jnp.abs(place), param.dtype)
    code = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.int32)
    negative = (code >> 15) ^ (place < 0)
    x = lax.bitcast_convert_type(magnitude | (negative << 31), jnp.float32)
    return jnp.where(jnp.isnan(param), jnp.nan, x).astype(jnp.float32)


def _place(x: jax.Array, dtype: Any, bits: int) -> jax.Array:
    """The place of a magnitude, int32, a multiple of what the remainder can tell apart."""
    magnitude = _bits_of(x) & _MAGNITUDE
    infinity = _infinity(dtype) << 16
    if dtype == jnp.float16:
        end = lax.bitcast_convert_type(jnp.float32(_FLOAT16_END), jnp.int32)
        normal = (magnitude - (112 << 23)) << 3
        subnormal = jnp.round(jnp.abs(x) * 2.0**40).astype(jnp.int32)
        place = jnp.where(magnitude < _SMALLEST_NORMAL_BITS, subnormal, normal)
        place = jnp.where(magnitude >= end, infinity, place)
    else:
        place = magnitude
    if bits == 8:
        # Nothing may become infinity by it, neither the number nor its cast.
        cast_ends = infinity - _HALF_A_STEP
        end = jnp.where(place < cast_ends, cast_ends, infinity)
        # To nearest, ties to even; but no tie up to where a step is halved, see `_tie_moved_by`.
        odd = jnp.where(place & 0xFFFF == 0x7F80, 0, (place >> 8) & 1)
        rounded = jnp.minimum((place + 0x7F + odd) & ~0xFF, end - (1 << 8))
        place = jnp.where(place < infinity, rounded, place)
    return place


def _tie_moved_by(dtype: Any) -> int:
    """What the lowest 8-bit remainder stands above half a step below its parameter.

    One last bit of float32: exactly half a step below, the cast to nearest even might be the
    parameter before.
    """
    return 1 << 3 if dtype == jnp.float16 else 1


def _magnitude_at(place: jax.Array, dtype: Any) -> jax.Array:
    """float32 bits of the magnitude at a place."""
    if dtype != jnp.float16:
        return place
    normal = ((place + 4) >> 3) + (112 << 23)  # 4: a tie was cut to the largest remainder
    small = jnp.minimum(place, _SMALLEST_NORMAL_PLACE).astype(jnp.float32) * 2.0**-40
    bits = jnp.where(place < _SMALLEST_NORMAL_PLACE, _bits_of(small), normal)
    return jnp.where(place >= _infinity(dtype) << 16, 0x7F800000, bits)


def _infinity(dtype: Any) -> int:
    return 0x7C00 if dtype == jnp.float16 else 0x7F80


def _nan_code(dtype: Any) -> int:
    return 0x7E00 if dtype == jnp.float16 else 0x7FC0


def _magnitude_code(param: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.int32) & 0x7FFF


def _bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)
