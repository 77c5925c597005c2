"""Kernels on partitioned arrays: every device runs one on its shard.

XLA cannot partition a kernel, so it is run under `jax.shard_map`, by the partition that an array's
type states (on a mesh of explicit axes) or that someone states for it. A shard has whole blocks and
knows where it lies in the whole array: codes, scales and random bits are those of the whole, and
nothing is moved between devices.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

LOCAL = "local"
"""Said of an array that is whole where it is worked on: on one device, or inside of a shard_map."""

Placement = str | NamedSharding | None


def sharding_of(array: Any) -> NamedSharding | None:
    """Of an array that is partitioned over named axes, and no tracer."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    sharding = array.sharding
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def placement_of(array: Any, hint: NamedSharding | None) -> Placement:
    """Where an array lies: `LOCAL`, a sharding, or None if that cannot be known.

    Args:
      array: an array or tracer.
      hint: what someone says of it, where its type does not.
    """
    sharding = jax.typeof(array).sharding
    types = set() if sharding.mesh.empty else set(sharding.mesh.axis_types)
    if types == {AxisType.Manual}:
        return LOCAL
    if types == {AxisType.Explicit}:
        return NamedSharding(sharding.mesh, sharding.spec)
    if hint is not None:
        return hint
    return LOCAL if jax.device_count() == 1 else None


def runs_on(sharding: NamedSharding) -> str:
    """The platform of a sharding's devices: ``"cpu"``, ``"tpu"`` or ``"cuda"``."""
    mesh = sharding.mesh
    platform = jax.default_backend()
    if isinstance(mesh, Mesh):
        platform = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device has of an array.

    Attributes:
      shape: of the shard.
      run: how many neighbouring rows of the shard are neighbours in the whole array.
      stride: rows from the first of a run to the first of the next, in the whole array.
      sharding: of the whole array.
    """

    shape: tuple[int, ...]
    run: int
    stride: int
    sharding: NamedSharding
    steps: tuple[tuple[tuple[str, ...], int], ...]  # mesh axes, and rows from shard to shard
    columns: tuple[tuple[str, ...], int]  # the same of columns

    def offset(self) -> jax.Array:
        """Row and column of the shard's first element in the whole array, uint32[2]."""
        row = jnp.uint32(0)
        for axes, rows in self.steps:
            row += lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(rows)
        axes, columns = self.columns
        column = lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)
        return jnp.stack([row, column * jnp.uint32(columns)])


def shard_of(shape: tuple[int, ...], sharding: NamedSharding, block: int) -> Shard | str:
    """One device's part of an array, or why a kernel cannot run on it."""
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes = [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]
    counts = [math.prod(sharding.mesh.shape[name] for name in names) for names in axes]
    for size, count in zip(shape, counts, strict=True):
        if size % count:
            return f"an axis of {size} cannot be cut into {count} equal parts"
    local = tuple(size // count for size, count in zip(shape, counts, strict=True))
    if counts[-1] > 1 and local[-1] % block:
        return f"shards of {local[-1]} columns would cut blocks of {block}"
    cut = [d for d, count in enumerate(counts[:-1]) if count > 1]
    if len(cut) > 2 or (len(cut) == 2 and math.prod(shape[: cut[0]]) > 1):
        return "too many of its axes are partitioned"
    rows_below = lambda d: math.prod(shape[d + 1 : -1])  # noqa: E731
    run = stride = math.prod(local[:-1])
    if cut:
        run, stride = local[cut[-1]] * rows_below(cut[-1]), shape[cut[-1]] * rows_below(cut[-1])
    return Shard(
        local,
        run,
        stride,
        sharding,
        steps=tuple((axes[d], local[d] * rows_below(d)) for d in cut),
        columns=(axes[-1] if counts[-1] > 1 else (), local[-1]),
    )


def on_every_shard(run: Callable[..., Any], shard: Shard, dense, stored, *others: Any) -> Any:
    """``run(dense, stored, *others)`` on every device, the arrays as their shards.

    Whatever ``run`` returns first and second is partitioned alike, all others are the same on every
    device.
    """
    spec, whole = shard.sharding.spec, PartitionSpec()
    return jax.shard_map(
        run,
        mesh=shard.sharding.mesh,
        in_specs=(spec, spec, *[whole] * len(others)),
        out_specs=(spec, spec, whole),
        check_vma=False,
    )(dense, stored, *others)
