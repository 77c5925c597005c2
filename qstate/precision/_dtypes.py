"""Which arrays are narrow, and what they are in float32."""

from typing import Any

import jax.numpy as jnp


def is_narrow(leaf: Any) -> bool:
    """Whether something has a floating dtype of fewer than 32 bits."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def is_inexact(leaf: Any) -> bool:
    """Whether something is of real or complex floating numbers."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def in_float32(leaf: Any) -> Any:
    """A narrow array in float32; anything else as it is."""
    return leaf.astype(jnp.float32) if is_narrow(leaf) else leaf
