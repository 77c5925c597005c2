"""Rounding a place between two grid points to one of them.

Stochastic rounding goes up where a fraction is above a threshold made of 16 random bits. The
thresholds lie half a step off the multiples of 2^-16, so a fraction of 0 never moves, and neither
does one that float32 arithmetic missed by less than 2^-17.
"""

import jax
import jax.numpy as jnp

RANDOM_BITS = 16


def threshold(bits: jax.Array) -> jax.Array:
    """A number in (0, 1) for random bits (uint32 below 2^16); exact, as is `offset`."""
    return bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-RANDOM_BITS + 2.0 ** -(
        RANDOM_BITS + 1
    )


def offset(bits: jax.Array, unit: float = 1.0) -> jax.Array:
    """``unit * (1/2 - threshold(bits))``: rounding to nearest after adding it is stochastic."""
    step = unit * 2.0**-RANDOM_BITS
    return bits.astype(jnp.int32).astype(jnp.float32) * -step + (unit / 2 - step / 2)


def round_nearest(index: jax.Array, fraction: jax.Array) -> jax.Array:
    """To the nearer grid point, ties to the even index."""
    tie_up = (fraction == 0.5) & (index % 2 == 1)
    return index + ((fraction > 0.5) | tie_up).astype(index.dtype)


def round_stochastic(index: jax.Array, fraction: jax.Array, bits: jax.Array) -> jax.Array:
    """Up with probability ``fraction``, by random bits (uint32 below 2^16)."""
    return index + (fraction > threshold(bits)).astype(index.dtype)
