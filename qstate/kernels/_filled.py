"""Arrays of one number, made from an abstract description of an array."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType


def filled(struct: Any, value: float) -> jax.Array:
    """An array of one number, of an array's type.

    Partitioned alike where the type says how (on a mesh of explicit axes), and varying over the
    same axes of a `jax.shard_map`: the branches of a condition have to agree in both.

    Args:
      struct: a `jax.ShapeDtypeStruct` from `jax.eval_shape`.
      value: the number.
    """
    mesh = getattr(struct.sharding, "mesh", None)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        return jnp.full_like(struct, value)
    array = jnp.full(struct.shape, value, struct.dtype)
    varying = getattr(struct.manual_axis_type, "varying", ())
    return lax.pcast(array, tuple(sorted(varying)), to="varying") if varying else array
