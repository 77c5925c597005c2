"""Arrays of one number, made from an abstract description of an array."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qstate.kernels._partition import sharding_of


def filled(struct: Any, value: float, beside: Any = None) -> jax.Array:
    """An array of one number, of an array's type.

    Partitioned alike where the type says how (on a mesh of explicit axes), and varying over the
    same axes of a `jax.shard_map`: the branches of a condition have to agree in both.

    Args:
      struct: a `jax.ShapeDtypeStruct` from `jax.eval_shape`.
      value: the number.
      beside: the parameter that it belongs to. Outside of `jax.jit` its devices are taken: a type
        knows of a mesh of explicit axes, but not of devices, and of no other mesh.
    """
    mesh = getattr(struct.sharding, "mesh", None)
    if mesh is not None and AxisType.Explicit in mesh.axis_types:
        place = sharding_of(beside)
        device = place and NamedSharding(place.mesh, struct.sharding.spec)
        return jnp.full_like(struct, value, device=device)
    array = jnp.full(struct.shape, value, struct.dtype, device=_fitting(struct, beside))
    varying = getattr(struct.manual_axis_type, "varying", ())
    return lax.pcast(array, tuple(sorted(varying)), to="varying") if varying else array


def _fitting(struct: Any, beside: Any) -> NamedSharding | None:
    """A parameter's sharding for what belongs to it; everywhere what cannot be cut like it."""
    sharding = sharding_of(beside)
    if sharding is None:
        return None
    try:
        sharding.shard_shape(struct.shape)
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding
