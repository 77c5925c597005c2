"""Functions that run in float32 inside of a 16-bit computation."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from qstate.precision._dtypes import is_narrow

F = TypeVar("F", bound=Callable[..., Any])


def fp32_island(fn: F, *, output_dtype: Any = None) -> F:
    """A function that gets its 16-bit inputs in float32, its result cast back.

    For what fails in 16 bits: softmax, norms, losses, and any sum or mean of many numbers.

    Args:
      fn: any function of arrays; other arguments, and those that are not floating, pass as they
        are.
      output_dtype: dtype of floating results. By default that of the narrow inputs (of several,
        what they promote to), so a result in the compute dtype; a loss wants ``jnp.float32``.

    Returns:
      The function, with the same signature; usable as a decorator.

    Example:
      >>> import jax, jax.numpy as jnp, qstate
      >>> x = jnp.full(4096, 10, jnp.float16)
      >>> root_mean_square = lambda x: jnp.sqrt(jnp.mean(x * x))
      >>> sum_of_squares = qstate.fp32_island(lambda x: jnp.sum(x * x), output_dtype=jnp.float32)
      >>> float(jnp.sum(x * x)), float(sum_of_squares(x))
      (inf, 409600.0)
      >>> qstate.fp32_island(root_mean_square)(x)
      Array(10., dtype=float16)

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018
    """

    @functools.wraps(fn)
    def island(*args, **kwargs):
        narrow = {x.dtype for x in jax.tree.leaves((args, kwargs)) if _is_narrow_array(x)}
        args, kwargs = jax.tree.map(
            lambda x: x.astype(jnp.float32) if _is_narrow_array(x) else x, (args, kwargs)
        )
        dtype = output_dtype
        if dtype is None and narrow:
            dtype = functools.reduce(jnp.promote_types, narrow)
        result = fn(*args, **kwargs)
        return result if dtype is None else jax.tree.map(lambda x: _cast(x, dtype), result)

    return island  # pyright: ignore[reportReturnType]


def _is_narrow_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and is_narrow(x)


def _cast(x: Any, dtype: Any) -> Any:
    floating = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if floating else x
