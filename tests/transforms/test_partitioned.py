"""Partitioned parameters, however their partition is known: the same bits as on one device."""

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

import qstate

COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)")
STEPS = 3
# Every leaf that can run them is traced with a kernel for TPUs and with one for GPUs, and on CPUs
# lowered without. That they are there says that its partition was known. The bias always has them.
BIAS, ALL = 2, 4
SHAPE = (64, 1024)
ROWS, LAST = PartitionSpec(("x", "y"), None), PartitionSpec(None, ("x", "y"))
BOTH = PartitionSpec("x", "y")

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs XLA_FLAGS=--xla_force_host_platform_device_count=8"
)


def scale_by_adam(recipe: str, **how: Any) -> Any:
    mu, nu = qstate.storage(recipe)
    return qstate.scale_by_adam(mu_storage=mu, nu_storage=nu, **how)


def adamw(recipe: str, **how: Any) -> Any:
    return qstate.adamw(1e-2, storage=recipe, **how)


def update(tx, gradients, state, params):
    return tx.update(gradients, state, params)


def _itself(tx):
    return tx


def _every_second(tx):
    return optax.MultiSteps(tx, every_k_schedule=2)


# What is stepped, and how: both give what comes out for the parameters, and the state.
WAYS = {"update": (scale_by_adam, update), "step": (adamw, qstate.step)}
PAIRS = [
    pytest.param("update", "fp8"),
    pytest.param("step", "fp4"),
    pytest.param("update", "fp4", marks=pytest.mark.slow),  # only as many of them are
    pytest.param("step", "fp8", marks=pytest.mark.slow),
]


class Known:
    """A mesh of 2 by 4 devices, and how the partition of parameters on it is known.

    By what ``init`` was given, by ``shardings``, or by the types of arrays. The first two are for
    meshes of automatic axes, whose types say nothing; the last needs one of explicit axes.
    """

    def __init__(self, by: str):
        self.by = by
        kind = AxisType.Explicit if by == "types" else AxisType.Auto
        self.mesh = jax.make_mesh((2, 4), ("x", "y"), (kind,) * 2)
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, spec: PartitionSpec) -> dict[str, NamedSharding]:
        return {"bias": self.everywhere, "kernel": NamedSharding(self.mesh, spec)}

    def options(self, spec: PartitionSpec) -> dict[str, Any]:
        return {"shardings": self.shardings(spec)} if self.by == "shardings" else {}

    def state(self, tx: Any, params: Any) -> Any:
        """Partitioned like the parameters, as far as its arrays can be."""
        # Tracers do not say how they are partitioned, so that nothing else is known.
        state = (tx.init if self.by == "init" else jax.jit(tx.init))(params)
        if self.by == "types":
            return state

        def put(path, x):
            names = [key.key for key in path if isinstance(key, DictKey)]
            sharding = params[names[-1]].sharding if names else self.everywhere
            return jax.device_put(x, sharding if _divides(sharding, x) else self.everywhere)

        return jax.tree.map_with_path(put, state)


@pytest.fixture(params=["init", "shardings", "types"])
def known(request) -> Known:
    return Known(request.param)


@pytest.fixture(params=["fp8", "fp4"])
def recipe(request) -> str:
    return request.param


def _divides(sharding: NamedSharding, x: jax.Array) -> bool:
    try:
        sharding.shard_shape(x.shape)
    except ValueError:
        return False
    return True


@functools.cache
def _numbers(shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """Parameters and gradients, all of which are kept in few bits."""
    rng = np.random.default_rng(0)

    def draw():
        shapes = {"bias": (4096,), "kernel": shape}
        return {
            k: jnp.float32(rng.normal(size=s) * rng.gamma(0.5, size=s)) for k, s in shapes.items()
        }

    return draw(), [draw() for _ in range(STEPS)]


def _all_steps(tx: Any, take: Any, state: Any, params: Any, gradients: list[Any]) -> Any:
    """What comes out of every step, and the step's program."""
    step = jax.jit(functools.partial(take, tx)).trace(gradients[0], state, params)
    program = step.lower().compile()
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    outs = []
    for g in gradients:
        # Updates stand for parameters in the next step: Adam alone reads none. What blocks that are
        # cut leave elsewhere goes back to where it was.
        params, state = program(g, state, params)
        outs.append((params, state))
        params, state = jax.device_put((params, state), where)
    return outs, str(step.jaxpr), program.as_text()


def _scanned(tx: Any, take: Any, state: Any, params: Any, gradients: list[Any]) -> Any:
    """What comes out of all steps in one program, and that program."""

    def body(carry, g):
        params, state = carry
        return take(tx, g, state, params), None

    def train(params, state, gradients):
        stacked = jax.tree.map(lambda *gs: jnp.stack(gs), *gradients)
        return lax.scan(body, (params, state), stacked)[0]

    steps = jax.jit(train).trace(params, state, gradients)
    program = steps.lower().compile()
    return program(params, state, gradients), str(steps.jaxpr), program.as_text()


@functools.cache
def _expected(way: str, recipe: str, shape: tuple[int, ...], wrap: Any, steps: Any) -> Any:
    make, take = WAYS[way]
    tx = wrap(make(recipe))
    params, gradients = _numbers(shape)
    return steps(tx, take, tx.init(params), params, gradients)[0]


def _assert_same_bits(tree: Any, expected: Any) -> None:
    paths = jax.tree.leaves_with_path(tree)
    for (path, a), b in zip(paths, jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        same = np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert same, f"{jax.tree_util.keystr(path)} differs"


def _check(
    known, way, recipe, shape, spec, *, kernels, moves=False, wrap=_itself, steps=_all_steps
):
    """Compares the bits with those of one device, and gives what came out."""
    make, take = WAYS[way]
    shardings = known.shardings(spec)
    params, gradients = _numbers(shape)
    params = jax.device_put(params, shardings)
    gradients = [jax.device_put(g, shardings) for g in gradients]
    with jax.set_mesh(known.mesh) if known.by == "types" else contextlib.nullcontext():
        tx = wrap(make(recipe, **known.options(spec)))
        outs, jaxpr, text = steps(tx, take, known.state(tx, params), params, gradients)
    _assert_same_bits(outs, _expected(way, recipe, shape, wrap, steps))
    assert jaxpr.count("pallas_call[") == kernels
    assert bool(COLLECTIVE.search(text)) == moves
    return outs


@pytest.mark.parametrize(("way", "recipe"), PAIRS)
@pytest.mark.parametrize("spec", [ROWS, LAST, BOTH], ids=["rows", "last", "both"])
def test_steps_are_those_of_one_device(known, way, recipe, spec):
    outs = _check(known, way, recipe, SHAPE, spec, kernels=ALL)
    sharding = known.shardings(spec)["kernel"]
    for leaf in jax.tree.leaves(outs):
        assert leaf.ndim < 2 or leaf.sharding.is_equivalent_to(sharding, 2)


def test_blocks_that_shards_would_cut(known, recipe, request):
    """The plain pass takes over, and XLA moves what it has to."""
    if known.by == "types":
        reason = "a cut axis cannot be reshaped to blocks on a mesh of explicit axes"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    _check(known, "step", recipe, (64, 512), LAST, kernels=BIAS, moves=True)


def test_more_axes_than_kernels_know(known, recipe):
    """The plain pass takes over."""
    spec = PartitionSpec(None, "x", "y", None)
    _check(known, "step", recipe, (3, 4, 16, 256), spec, kernels=BIAS)


def test_accumulated_gradients(known, recipe):
    _check(known, "update", recipe, SHAPE, BOTH, kernels=ALL, wrap=_every_second)


@pytest.mark.parametrize(("way", "recipe"), PAIRS)
def test_steps_inside_of_scan(way, recipe):
    _check(Known("types"), way, recipe, SHAPE, BOTH, kernels=ALL, steps=_scanned)


def test_init_where_no_mesh_is_set():
    """Outside of `jax.jit`, as optax's; under it JAX asks for a mesh, of optax's too."""
    params = jax.device_put(_numbers(SHAPE)[0], Known("types").shardings(BOTH))
    tx = adamw("fp8")
    state = tx.init(params)
    assert state[0].mu.codes["kernel"].sharding == params["kernel"].sharding
    params, _ = jax.jit(functools.partial(qstate.step, tx))(params, state, params)
    assert np.isfinite(params["kernel"]).all()


@pytest.mark.parametrize("spec", [ROWS, LAST, BOTH], ids=["rows", "last", "both"])
def test_init_partitions_the_state_like_the_parameters(spec):
    """As optax's does, outside of `jax.jit`; what has fewer numbers than shards is everywhere."""
    known = Known("init")
    params = jax.device_put(_numbers(SHAPE)[0], known.shardings(spec))
    mu = scale_by_adam("fp8").init(params).mu
    assert mu.codes["kernel"].sharding == params["kernel"].sharding
    wanted = params["kernel"].sharding
    assert mu.scales["kernel"].sharding == wanted
    narrow = jax.device_put(jnp.ones((64, 512)), NamedSharding(known.mesh, LAST))
    assert scale_by_adam("fp8").init(narrow).mu.scales.sharding.is_fully_replicated


def test_tracers_take_nothing_back(known):
    """A state's shapes may be asked for again, such as to restore it."""
    if known.by != "init":
        pytest.skip("nothing is captured")
    params = jax.device_put(_numbers(SHAPE)[0], known.shardings(BOTH))
    tx = scale_by_adam("fp8")
    state = tx.init(params)
    jax.eval_shape(tx.init, params)
    text = str(jax.jit(tx.update).trace(params, state, params).jaxpr)
    assert text.count("pallas_call[") == ALL
