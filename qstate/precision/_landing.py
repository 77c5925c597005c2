"""Updates by which `optax.apply_updates` arrives at a chosen 16-bit number.

It adds an update to a parameter in the wider of their dtypes and casts the sum. The difference of
two 16-bit numbers in float32, added to the first in float32, is so near the second that the cast
ends there, unless the second is some 2^16 times smaller than the first: then float32 has no number
for the way.
"""

import jax
import jax.numpy as jnp
from jax import lax


def update_to(param: jax.Array, target: jax.Array) -> jax.Array:
    """The update, float32, by which a parameter becomes a target of its dtype.

    It is -0.0 where the parameter is there already: that leaves -0.0 as it is, too.
    """
    way = target.astype(jnp.float32) - param.astype(jnp.float32)
    return jnp.where(same_bits(param, target), jnp.float32(-0.0), way)


def sum_of(param: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `optax.apply_updates` makes of a parameter, and the float32 sum that it casts."""
    total = param.astype(jnp.float32) + update
    return total.astype(param.dtype), total


def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether 16-bit numbers are the same. As bits, so that XLA cannot leave out the cast to 16."""
    return _bits(a) == _bits(b)


def equal(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same, or two zeros: no update leads from 0.0 to -0.0."""
    return same_bits(a, b) | ((_bits(a) | _bits(b)) & 0x7FFF == 0)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)
