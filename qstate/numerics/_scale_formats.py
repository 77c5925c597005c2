"""How one scale is stored: float32, bfloat16 or a power of two; zero and NaN in all of them.

A scale is the magnitude that lands on the format's largest number (for a power of two, on the power
of two at or below that). Scales are worked on as bits: float arithmetic flushes subnormals on some
machines and not on others, so magnitudes below the smallest normal float32 count as zero
everywhere.

While it is worked on a scale is *wide*: a float32, or a power of two's biased exponent (int32).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCALE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "power_of_two": jnp.uint8}

_NAN = 0x7FC00000
_INFINITY = 0x7F800000
_SMALLEST_NORMAL = 0x00800000
_FRACTION = 0x007FFFFF


def store_scale(
    bits: jax.Array, scale: str, *, top: float, upwards: bool, coarse: bool
) -> jax.Array:
    """A largest magnitude as a scale.

    Args:
      bits: what a scaling measured, the bits of a float32 that is not negative (int32); of infinity
        or NaN where it is bad.
      scale: ``"float32"``, ``"bfloat16"`` or ``"power_of_two"``.
      top: the format's largest number.
      upwards: round bfloat16 up, so that nothing saturates (stochastic rounding is unbiased then);
        else down, so that the largest magnitude saturates and decodes to the scale itself, which
        gives the same scale when it is measured again.
      coarse: keep 16 bits of a float32 scale, where the largest magnitude does not decode to the
        scale itself: measuring what was decoded must give the same scale back.

    Returns:
      The scale, wide, as it comes back when it is stored.
    """
    bits = jnp.minimum(bits, _INFINITY)
    bad, zero = bits == _INFINITY, bits < _SMALLEST_NORMAL
    if scale == "power_of_two":
        fraction = int(np.float32(top).view(np.uint32)) & _FRACTION
        exponent = (bits >> 23) + ((bits & _FRACTION) > fraction).astype(jnp.int32)
        exponent = jnp.minimum(exponent, 254)
        return jnp.where(bad, 255, jnp.where(zero, 0, exponent))
    if scale == "bfloat16":
        # Down, but for what float32 arithmetic missed a multiple by.
        bits = _drop_low_bits(bits + (0xFFFF if upwards else 0x100), 16)
    elif coarse:
        bits = _drop_low_bits(bits + 0x80, 8)
    bits = jnp.where(bad, _NAN, jnp.where(zero, 0, bits))
    return lax.bitcast_convert_type(bits, jnp.float32)


def scale_number(wide: jax.Array) -> jax.Array:
    """A wide scale as float32; zero and NaN come back as themselves."""
    if wide.dtype != jnp.int32:
        return wide
    return lax.bitcast_convert_type(jnp.where(wide == 255, _NAN, wide << 23), jnp.float32)


def narrow_scale(wide: jax.Array, scale: str) -> jax.Array:
    """A wide scale as it is stored: float32, bfloat16 or uint8."""
    if scale == "power_of_two":
        return wide.astype(jnp.uint8)
    if scale == "bfloat16":
        bits = lax.bitcast_convert_type(wide, jnp.uint32) >> 16
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return wide


def widen_scale(stored: jax.Array) -> jax.Array:
    """The inverse of `narrow_scale`."""
    if stored.dtype == jnp.uint8:
        return stored.astype(jnp.int32)
    if stored.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(stored, jnp.uint16).astype(jnp.uint32) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)
    return stored


def _drop_low_bits(bits: jax.Array, count: int) -> jax.Array:
    """Clear a float's low bits, staying below infinity."""
    return jnp.minimum(bits >> count, (_INFINITY >> count) - 1) << count
