"""Rounding a place between two grid points to one of them."""

import jax
import jax.numpy as jnp

RANDOM_BITS = 16


def round_nearest(index: jax.Array, fraction: jax.Array) -> jax.Array:
    """To the nearer grid point, ties to the even index."""
    tie_up = (fraction == 0.5) & (index % 2 == 1)
    return index + ((fraction > 0.5) | tie_up).astype(index.dtype)


def round_stochastic(index: jax.Array, fraction: jax.Array, bits: jax.Array) -> jax.Array:
    """Up with probability ``fraction``, by comparison with ``bits`` (uint32 below 2^16).

    The thresholds lie half a step off the multiples of 2^-16, so a fraction of 0 never moves, and
    neither does one that float32 arithmetic missed by less than 2^-17.
    """
    threshold = (bits.astype(jnp.float32) + 0.5) * 2.0**-RANDOM_BITS
    return index + (fraction > threshold).astype(index.dtype)
