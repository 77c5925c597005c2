"""A step on 256 TPUs: every device runs one kernel on its shard, in place, and nothing is moved."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.programs import adam, installed, state_first, stored_arrays
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

import qstate
from qstate.cli._targets import V5E, Compiled

DEVICES = 256
SMALLEST = 512  # bytes that a TPU keeps for a scalar or a key
MOVED = 1.03  # times what has to be: every byte of a shard read once and written once
TEMPORARY = 0.05  # bytes a parameter of a shard; up to 1 MB is there for shards of any size

UNNAMED = dataclasses.replace(V5E, implementation=None)
BOTH, LAST = PartitionSpec("x", "y"), PartitionSpec(None, ("x", "y"))
# A shard has 2^25 parameters: what a pass too many would move does not fit into the chip's memory.
SHAPE = (262144, 32768)
PARTITIONS = {
    "rows": (SHAPE, PartitionSpec(("x", "y"), None)),
    "both": (SHAPE, BOTH),
    "last": ((16384, 524288), LAST),
    "last-two-of-three": ((4, 65536, 32768), PartitionSpec(None, "x", "y")),
}


@pytest.fixture(scope="module")
def devices() -> np.ndarray:
    return np.array(installed(V5E).devices("v5e:16x16")).reshape(16, 16)


@pytest.fixture(scope="module")
def mesh(devices) -> Mesh:
    """Its axes are automatic: the types of what is traced say nothing of partitions."""
    return Mesh(devices, ("x", "y"))


@pytest.fixture(scope="module")
def explicit(devices) -> Mesh:
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def matrix(sharding: NamedSharding, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    return {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}


def state_of(tx: Any, params: dict[str, Any], but: tuple[int, ...] = ()) -> Any:
    """The state: what has a parameter's name is partitioned like it, all else is everywhere.

    So are arrays of the shape ``but``.
    """
    mesh = next(iter(params.values())).sharding.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(path, x):
        names = [key.key for key in path if isinstance(key, DictKey)]
        sharding = params[names[-1]].sharding if names and x.shape != but else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    unplaced = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
    return jax.tree.map_with_path(put, jax.eval_shape(tx.init, unplaced))


def update(tx: Any, params: dict[str, Any]) -> Compiled:
    return V5E.compile(state_first(tx), params, state_of(tx, params), donate=1)


def check(program: Compiled, state: Any, read: list[Any], kernel: int) -> None:
    """One kernel, in place, that reads some arrays of the parameter's shape and writes one."""
    partitioned = [x for x in jax.tree.leaves(state) if x.ndim > 1]
    scalars = len(jax.tree.leaves(state)) - len(partitioned)
    assert program.kernels == [kernel]
    assert program.collectives == []
    assert program.arguments == qstate.nbytes((partitioned, read)) // DEVICES + SMALLEST * scalars
    assert program.in_place >= qstate.nbytes(partitioned) // DEVICES
    assert program.temporary <= TEMPORARY * read[0]["w"].size / DEVICES
    assert (
        program.moved <= MOVED * qstate.nbytes((partitioned, read, partitioned, read[0])) / DEVICES
    )


def check_kernel(mesh: Mesh, recipe: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    sharding = NamedSharding(mesh, spec)
    tx, params = adam(V5E, *qstate.storage(recipe), shardings=sharding), matrix(sharding, shape)
    state = state_of(tx, params)
    check(update(tx, params), state, [params], kernel=stored_arrays(state))


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize(("shape", "spec"), PARTITIONS.values(), ids=PARTITIONS)
def test_a_shard_is_updated_by_one_kernel_in_place(mesh, recipe, shape, spec):
    check_kernel(mesh, recipe, shape, spec)


@pytest.mark.xfail(strict=True, reason="XLA copies their scales, padded to rows of 128 numbers")
@pytest.mark.parametrize("recipe", ["fp8", "fp4"])
def test_shards_with_rows_of_one_block(mesh, recipe):
    check_kernel(mesh, recipe, SHAPE, LAST)


def test_the_kernel_is_found_by_the_shardings(mesh):
    sharding = NamedSharding(mesh, BOTH)
    tx, params = adam(UNNAMED, *qstate.storage("fp8"), shardings=sharding), matrix(sharding)
    check(update(tx, params), state_of(tx, params), [params], kernel=4)


@pytest.mark.parametrize("target", [V5E, UNNAMED], ids=["named", "unnamed"])
def test_the_kernel_is_found_by_the_types(explicit, target):
    tx, params = adam(target, *qstate.storage("fp8")), matrix(NamedSharding(explicit, BOTH))
    check(update(tx, params), state_of(tx, params), [params], kernel=4)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp4"])
def test_parameters_are_updated_in_place_too(mesh, recipe):
    sharding = NamedSharding(mesh, BOTH)
    how = {"shardings": sharding, "implementation": "pallas_tpu"}
    tx, params = qstate.adamw(1e-3, storage=recipe, **how), matrix(sharding)
    state = state_of(tx, params)
    program = V5E.compile(
        lambda params, state, gradients: qstate.step(tx, gradients, state, params),
        params,
        state,
        params,
        donate=(0, 1),
    )
    check(program, state, [params, params], kernel=1 + stored_arrays(state[0]))
    assert program.in_place >= qstate.nbytes((params, state)) // DEVICES


def test_leaves_are_partitioned_each_in_its_way(mesh):
    specs = {"up": BOTH, "down": PartitionSpec("y", "x"), "bias": PartitionSpec()}
    shapes = {"up": (4096, 16384), "down": (16384, 4096), "bias": (1024,)}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=shardings[name])
        for name in shapes
    }
    program = update(adam(V5E, *qstate.storage("fp8"), shardings=shardings), params)
    assert program.kernels == [4, 4]
    assert program.collectives == []


def test_without_the_partition_there_is_no_kernel(mesh):
    """And still nothing is moved: XLA partitions the plain pass by itself."""
    params = matrix(NamedSharding(mesh, BOTH))
    program = update(adam(UNNAMED, *qstate.storage("fp8")), params)
    assert program.kernels == []
    assert program.collectives == []


def test_blocks_that_shards_would_cut(mesh):
    """Shards of half a block need each other's numbers: the checks above have to see that."""
    sharding, shape = NamedSharding(mesh, LAST), (8192, 16384)
    tx = adam(UNNAMED, *qstate.storage("fp8"), shardings=sharding)
    params = matrix(sharding, shape)
    state = state_of(tx, params, but=(8192, 128))  # scales, fewer in a row than there are devices
    with pytest.warns(UserWarning, match="plain loops.*would cut blocks of 128"):
        program = V5E.compile(state_first(tx), params, state, donate=1)
    assert program.kernels == []
    assert program.collectives != []
