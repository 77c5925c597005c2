"""Kernels on partitioned arrays: every shard is its part of the whole, and nothing is moved."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import qstate
from qstate.kernels import Program, _dispatch, placement_of, run
from qstate.kernels._dispatch import LOCAL
from qstate.kernels._partition import shard_of
from qstate.numerics import encode
from qstate.state import Hints
from qstate.transforms._adam import _Direction, advance

SCALARS = {
    name: jnp.float32(value)
    for name, value in {
        "c1": 0.1,
        "c2": 0.001,
        "m_weight": 2.0,
        "v_weight": 3.0,
        "eps": 1e-8,
        "eps_root": 0.0,
    }.items()
}
WORDS = jnp.array([[5, 6]], jnp.uint32)
COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")

CASES = [
    ((64, 1024), P("a", "b")),
    ((64, 512), P(("a", "b"), None)),
    ((64, 1024), P(None, ("a", "b"))),
    ((64, 300), P("a")),
    ((64, 256), P()),
    ((3, 256, 384), P(None, ("a", "b"))),
    ((4, 64, 1024), P("a", None, "b")),
    ((4, 256, 512), P("a", "b")),
    ((2, 4, 64, 256), P("a", "b", None)),
]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


def direct(scalars, dense, fresh):
    return [_Direction(nesterov=False, rooted=False)(scalars, dense, fresh)]


def keep(scalars, fresh):
    return fresh


def program(recipe):
    storages = qstate.storage(recipe)
    return Program(
        advance, direct, keep, storages, storages, (jnp.dtype(jnp.float32),), onto=(None,)
    )


def leaf(recipe, shape):
    """A gradient and what is stored of two averages."""
    rng = np.random.default_rng(0)
    g, m, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    mu, nu = qstate.storage(recipe)
    return g, [encode(m, mu, 1), encode(v * v, nu, 2)]


def step(recipe, shape, **how):
    return jax.jit(
        lambda g, stored, scalars: run(
            program(recipe), shape, [g], stored, scalars, WORDS, jnp.int32(1), **how
        )
    )


@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("recipe", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize(("shape", "spec"), CASES, ids=str)
def test_shards_are_the_whole_bit_for_bit(mesh, kernel, recipe, shape, spec):
    if recipe != "fp8" and len(shape) > 2:
        pytest.skip("ranks are tried in fp8")
    sharding = NamedSharding(mesh, spec)
    g, stored = leaf(recipe, shape)
    expected = step(recipe, shape, implementation="reference")(g, stored, SCALARS)
    place = lambda tree: jax.tree.map(lambda x: jax.device_put(x, sharding), tree)  # noqa: E731
    sharded = step(recipe, shape, implementation=kernel, placement=sharding, interpret=True)
    operands = place(g), place(stored), SCALARS
    got = sharded(*operands)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for x in jax.tree.leaves(got[:2]):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert not COLLECTIVES.search(sharded.lower(*operands).compile().as_text())


@pytest.mark.parametrize(
    ("shape", "spec", "reason"),
    [
        ((64, 512), P(None, ("a", "b")), "would cut blocks of 128"),
        ((63, 512), P("a"), "cannot be cut into 2 equal parts"),
        ((3, 4, 64, 256), P(None, "a", "b"), "too many of its axes"),
    ],
    ids=["blocks", "rest", "axes"],
)
def test_why_a_shard_has_no_kernel(mesh, shape, spec, reason):
    assert reason in shard_of(shape, NamedSharding(mesh, spec), 128)


def test_a_named_kernel_says_why_it_cannot_run_on_shards(mesh):
    shape, sharding = (64, 512), NamedSharding(mesh, P(None, ("a", "b")))
    how = {"implementation": "pallas_tpu", "placement": sharding}
    with pytest.raises(ValueError, match="would cut blocks of 128"):
        step("fp8", shape, **how).lower(*leaf("fp8", shape), SCALARS)


def test_where_an_array_lies(mesh):
    hint = NamedSharding(mesh, P("a"))
    x = jnp.ones((8, 8))
    assert placement_of(x, None) is None  # there are eight devices here
    assert placement_of(x, hint) is hint
    seen = []

    def inside(x):
        seen.append(placement_of(x, hint))
        return x

    jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(x)
    explicit = jax.make_mesh((2, 4), ("a", "b"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        jax.jit(inside)(jax.device_put(x, NamedSharding(explicit, P(None, "b"))))
    assert seen[0] == LOCAL
    assert seen[1].spec == P(None, "b")


def test_shardings_are_taken_from_the_parameters_or_from_the_user(mesh):
    sharding = NamedSharding(mesh, P("a", "b"))
    params = {"w": jax.device_put(jnp.ones((8, 8)), sharding), "b": jnp.ones(8), "none": None}
    hints = Hints(None)
    assert hints.of(params) == [None] * 3
    hints.look_at(params)
    assert hints.of(params) == [None, None, sharding]
    assert hints.of({"w": params["w"]}) == [None]  # not what was looked at
    jax.jit(lambda params: hints.look_at(params))(params)
    assert hints.of(params) == [None, None, sharding]  # tracers do not say otherwise
    given = Hints({"w": sharding, "b": NamedSharding(mesh, P()), "none": None})
    assert [h and h.spec for h in given.of(params)] == [P(), None, P("a", "b")]
    with pytest.raises(TypeError, match="NamedSharding like the parameters"):
        Hints({"w": P("a")})


@pytest.fixture
def on_tpus(monkeypatch):
    """As if devices were TPUs, and nothing had been said yet."""
    _dispatch._say_that_no_kernel_runs.cache_clear()
    monkeypatch.setattr(_dispatch, "runs_on", lambda sharding: "tpu")


def trace(mesh, spec, storage="fp8", shape=(64, 256)):
    mu, _ = qstate.storage(storage)
    tx = qstate.scale_by_adam(mu_storage=mu, shardings=NamedSharding(mesh, spec))
    gradient = jax.ShapeDtypeStruct(shape, jnp.float32)
    jax.eval_shape(tx.update, gradient, jax.eval_shape(tx.init, gradient))


def test_says_once_that_shards_cut_blocks(on_tpus, mesh):
    with pytest.warns(UserWarning, match="shards of 64 columns would cut blocks of 128"):
        trace(mesh, P(None, "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(mesh, P(None, "b"), "fp4")  # other programs of that shape


def test_says_nothing_where_they_do_not(on_tpus, mesh, recwarn):
    trace(mesh, P("b", None))
    assert not recwarn.list


def test_says_nothing_where_no_kernel_would_run_anyway(mesh, recwarn):
    _dispatch._say_that_no_kernel_runs.cache_clear()
    trace(mesh, P(None, "b"))
    assert not recwarn.list
