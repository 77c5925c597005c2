"""One infinite number on one of eight devices: all of them skip, and only a flag travels for it."""

import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qstate

SCALE = 2.0**10
MOVED = re.compile(
    r"= \(?(\w+)\[([\d,]*)\]\S* "
    r"(?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)"
)

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs XLA_FLAGS=--xla_force_host_platform_device_count=8"
)
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

OPTIMIZERS = {
    "qstate-fp8": lambda: qstate.adamw(
        optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1, reset=qstate.every(2)
    ),
    "optax": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def wrapped(inner, **settings):
    return qstate.with_loss_scale(inner, jmp.DynamicLossScale(jnp.float32(SCALE)), **settings)


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)  # noqa: E731
    return {"b": draw(16), "scalar": draw(), "w": draw(64, 128)}


def step_of(tx):
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def spec_of(x):
    return PartitionSpec("x") if x.ndim and x.shape[0] % 8 == 0 else PartitionSpec()


def assert_same_bits(tree, expected):
    leaves = jax.tree.leaves_with_path(tree)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        same = np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert same, jax.tree_util.keystr(path)


def assert_skipped(before, after):
    """Nothing but the scale has changed, and that alike on all devices."""
    assert_same_bits(after[0], before[0])
    assert_same_bits(after[1].inner_state, before[1].inner_state)
    shards = [float(shard.data) for shard in after[1].scaler.value.addressable_shards]
    assert shards == [SCALE / 2] * 8
    counts = [int(shard.data) for shard in after[1].total_notfinite.addressable_shards]
    assert counts == [1] * 8


@axis_types
@optimizers
def test_under_jit(make, axis_type):
    tx = wrapped(make())
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    place = lambda t: jax.tree.map(  # noqa: E731
        lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x))), t
    )
    good = tree(1, SCALE)
    expected = jax.jit(step_of(tx))(tree(0), tx.init(tree(0)), good)
    with jax.set_mesh(mesh):
        step = jax.jit(step_of(tx))
        stepped = step(place(tree(0)), jax.jit(tx.init)(place(tree(0))), place(good))
        assert_same_bits(stepped, expected)
        assert not stepped[0]["w"].is_fully_replicated
        for row in (0, 63):
            bad = tree(2, SCALE)
            bad["w"] = bad["w"].at[row, 127].set(jnp.nan)
            assert_skipped(stepped, step(*stepped, place(bad)))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_under_shard_map(check_vma):
    """Without types that say what varies, the axis has to be named."""
    tx = wrapped(OPTIMIZERS["optax"](), axis_name=None if check_vma else "x")
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    state = tx.init(tree(0))
    specs = jax.tree.map(spec_of, (tree(0), state, tree(0)))
    step = jax.jit(
        jax.shard_map(
            step_of(tx), mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=check_vma
        )
    )
    stepped = step(tree(0), state, tree(1, SCALE))
    alone = jax.jit(step_of(wrapped(OPTIMIZERS["optax"]())))
    assert_same_bits(stepped, alone(tree(0), state, tree(1, SCALE)))
    for row in (0, 40):
        bad = tree(2, SCALE)
        bad["w"] = bad["w"].at[row, 127].set(-jnp.inf)
        assert_skipped(stepped, step(*stepped, bad))


@optimizers
def test_under_pmap(make):
    """Every device has a batch of its own, and the axis has to be named."""
    tx = wrapped(make(), axis_name="devices")
    spread = lambda t: jax.tree.map(lambda x: jnp.stack([x] * 8), t)  # noqa: E731
    step = jax.pmap(step_of(tx), axis_name="devices")
    start = spread((tree(0), tx.init(tree(0))))
    stepped = step(*start, spread(tree(1, SCALE)))
    bad = spread(tree(2, SCALE))
    bad["b"] = bad["b"].at[5, 3].set(jnp.inf)
    after = step(*stepped, bad)
    assert_same_bits(after[0], stepped[0])
    assert_same_bits(after[1].inner_state, stepped[1].inner_state)
    np.testing.assert_array_equal(after[1].scaler.value, [SCALE / 2] * 8)


def test_two_named_axes():
    tx = wrapped(optax.sgd(1.0), axis_name=("x", "y"))
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    spec = PartitionSpec("x", "y")
    state = tx.init(jnp.zeros((2, 4)))
    specs = (spec, jax.tree.map(lambda _: PartitionSpec(), state), spec)
    step = jax.jit(
        jax.shard_map(step_of(tx), mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    )
    good = jnp.full((2, 4), SCALE)
    params, stepped = step(jnp.zeros((2, 4)), state, good)
    np.testing.assert_array_equal(params, -1.0)
    for row, column in np.ndindex(2, 4):
        after, skipped = step(params, stepped, good.at[row, column].set(jnp.nan))
        np.testing.assert_array_equal(after, params)
        assert float(skipped.scaler.value) == SCALE / 2


@axis_types
def test_nothing_but_flags_is_sent(axis_type):
    """Elementwise optimizers send nothing themselves, so all of it is for the guard."""
    tx = wrapped(OPTIMIZERS["qstate-fp8"]())
    mesh = jax.make_mesh((8,), ("x",), (axis_type,))
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, PartitionSpec("x")))}
        state = jax.jit(tx.init)(params)
        compiled = jax.jit(tx.update).lower(params, state, params).compile()
    moved = MOVED.findall(compiled.as_text())
    assert moved
    assert {shape for _, shape in moved} == {""}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_gradients_that_were_summed_over_the_named_axis(check_vma):
    tx = wrapped(optax.adam(1e-2), axis_name="x")
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
    step = jax.jit(
        jax.shard_map(
            lambda p, s, g: step_of(tx)(p, s, jax.lax.psum(g, "x")),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("x")),
            out_specs=(PartitionSpec(), PartitionSpec()),
            check_vma=check_vma,
        )
    )
    params, gradients = jnp.ones(4), jnp.ones(32)
    stepped = step(params, tx.init(params), gradients)
    assert (np.asarray(stepped[0]) < 1).all()
    after = step(*stepped, gradients.at[17].set(jnp.nan))
    assert_same_bits((after[0], after[1].inner_state), (stepped[0], stepped[1].inner_state))
    assert int(after[1].total_notfinite) == 1


def test_under_a_shard_map_over_some_axes_only():
    """By hand over one axis of a mesh, by the compiler over the other."""
    tx = wrapped(optax.adamw(1e-2))
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    params = jnp.ones((8, 16))
    state = tx.init(params)
    specs = jax.tree.map(
        lambda x: PartitionSpec("x") if x.ndim else PartitionSpec(), (params, state, params)
    )
    step = jax.jit(
        jax.shard_map(step_of(tx), mesh=mesh, axis_names={"x"}, in_specs=specs, out_specs=specs[:2])
    )
    stepped = step(params, state, params)
    after = step(*stepped, params.at[7, 3].set(jnp.nan))
    assert_same_bits((after[0], after[1].inner_state), (stepped[0], stepped[1].inner_state))
    assert int(after[1].total_notfinite) == 1
