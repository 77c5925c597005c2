"""Shapes, dtypes and leaves that are no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate

STORAGES = ("bf16", "fp8", "fp4", "int8", "int4")
QUICK_STORAGES = [
    pytest.param(name, marks=[] if name in ("fp8", "fp4") else [pytest.mark.slow])
    for name in STORAGES
]
SHAPES = [(1601, 1280), (7,), (3, 5, 2), (129,), (), (0, 3), (1, 1), (4097,), (2, 1, 300)]


@pytest.mark.parametrize("storage", QUICK_STORAGES)
def test_every_shape_steps_close_to_float32(storage):
    rng = np.random.default_rng(0)
    shapes = {str(shape): shape for shape in SHAPES if shape != (1601, 1280)}
    _follows_float32(storage, shapes, rng, exempt=lambda path, leaf: False)


@pytest.mark.parametrize("storage", ["fp8", "fp4"])
def test_a_large_odd_shape_steps_close_to_float32(storage):
    rng = np.random.default_rng(0)
    _follows_float32(storage, {"embedding": (1601, 1280)}, rng, exempt=None)


def _follows_float32(storage, shapes, rng, exempt):
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    tx = qstate.adam(1.0, 0.5, 0.5, storage=storage, exempt=exempt)
    plain = optax.adam(1.0, 0.5, 0.5)
    state, plain_state = tx.init(params), plain.init(params)
    step, plain_step = jax.jit(tx.update), jax.jit(plain.update)
    for _ in range(3):
        g = {k: jnp.asarray(rng.choice([-1, 1], s) * rng.uniform(0.5, 1, s), jnp.float32)
             for k, s in shapes.items()}  # fmt: skip
        updates, after = step(g, state)
        expected, plain_state = plain_step(g, plain_state)
        assert jax.tree.map(lambda a: a.shape, after) == jax.tree.map(lambda a: a.shape, state)
        state = after
        for name in shapes:
            assert updates[name].shape == shapes[name]
            np.testing.assert_allclose(updates[name], expected[name], atol=0.5)
            error = np.mean((updates[name] - expected[name]) ** 2) if updates[name].size else 0
            assert error < 0.04


@pytest.mark.parametrize("storage", STORAGES)
def test_small_leaves_stay_float32_by_default(storage):
    params = {str(shape): jnp.zeros(shape) for shape in SHAPES}
    state = qstate.adamw(1e-3, storage=storage).init(params)[0]
    rows = {row.path: row.storage for row in qstate.describe(state)}
    for name, p in params.items():
        for field, average in (("mu", state.mu), ("nu", state.nu)):
            exact = name not in ("(1601, 1280)", "(4097,)")
            assert (rows[f"{field}/{name}"] == "f32") == exact
            assert (average.codes[name].dtype == jnp.float32) == exact
            if exact:
                assert average.codes[name].shape == p.shape


@pytest.mark.parametrize("storage", QUICK_STORAGES)
def test_leaves_that_are_no_floats(storage):
    rng = np.random.default_rng(1)
    params = {
        "empty": jnp.zeros((0, 3)),
        "ids": jnp.arange(5000, dtype=jnp.int32),
        "mask": jnp.ones((64, 128), bool),
        "none": None,
        "w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32),
    }
    tx = qstate.adamw(1e-2, weight_decay=0.1, storage=storage)
    state = tx.init(params)
    alone = tx.init({"w": params["w"]})
    assert qstate.nbytes(state) == qstate.nbytes(alone)

    @jax.jit
    def step(p, state):
        updates, state = tx.update(p, state, p)
        return optax.apply_updates(p, updates), state

    p, after = step(params, state)
    p, after = step(p, after)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert p["none"] is None
    for name in ("empty", "ids", "mask"):
        assert p[name].dtype == params[name].dtype
        np.testing.assert_array_equal(p[name], params[name])
    assert np.all(p["w"] != params["w"])


def test_integer_gradients_of_jax_grad_are_taken():
    params = {"ids": jnp.arange(5000), "w": jnp.ones((64, 128))}
    tx = qstate.adamw(1e-2)
    loss = lambda p: jnp.sum(p["w"][p["ids"] % 64] ** 2)  # noqa: E731
    gradients = jax.grad(loss, allow_int=True)(params)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(after["ids"], params["ids"])
    assert np.all(after["w"] < params["w"])


@pytest.mark.xfail(
    strict=True,
    raises=TypeError,
    reason="optax.scale makes floats of an integer leaf's zero update, so the branches differ",
)
def test_integer_leaves_inside_of_apply_if_finite():
    params = {"ids": jnp.arange(5000), "w": jnp.ones((64, 128))}
    tx = optax.apply_if_finite(qstate.adamw(1e-2), 3)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["ids"], params["ids"])


@pytest.mark.parametrize("storage", QUICK_STORAGES)
def test_masked_leaves_hold_no_bytes(storage):
    params = {"frozen": jnp.ones((512, 512)), "w": jnp.ones((64, 128))}
    tx = optax.masked(qstate.adamw(1e-2, storage=storage), {"frozen": False, "w": True})
    alone = qstate.adamw(1e-2, storage=storage).init({"w": params["w"]})
    state = tx.init(params)
    assert qstate.nbytes(state) == qstate.nbytes(alone)
    updates, _ = jax.jit(tx.update)(params, state, params)
    np.testing.assert_array_equal(updates["frozen"], params["frozen"])


def test_a_gradient_of_none_leaves_its_average_alone():
    params = {"a": jnp.ones((64, 128)), "b": jnp.ones((64, 128))}
    tx = qstate.scale_by_adam(
        mu_storage=qstate.storage("fp8")[0], nu_storage=qstate.storage("fp8")[1]
    )
    _, state = tx.update(params, tx.init(params))
    updates, after = tx.update({"a": params["a"], "b": None}, state)
    assert updates["b"] is None
    np.testing.assert_array_equal(after.mu.codes["b"], state.mu.codes["b"])
    np.testing.assert_array_equal(after.nu.scales["b"], state.nu.scales["b"])
    assert np.any(after.mu.scales["a"] != state.mu.scales["a"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", QUICK_STORAGES)
def test_zero_gradients_of_16_bit_parameters_give_zero_updates(storage, dtype):
    params = {"w": jnp.ones((64, 128), dtype), "b": jnp.ones(5, dtype)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = qstate.adam(1e-2, storage=storage)
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = step(zeros, state, params)
    for name, update in updates.items():
        assert update.dtype == dtype
        np.testing.assert_array_equal(update, zeros[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_averages_of_16_bit_parameters_are_float32(dtype):
    # 1e-3 of (1e-3)^2 is below float16's smallest number.
    params = {"w": jnp.full((64, 128), 1e-3, dtype)}
    tx = qstate.scale_by_adam()
    updates, state = tx.update(params, tx.init(params))
    assert state.nu.codes["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.nu.codes["w"], 1e-9, rtol=0.01)
    np.testing.assert_allclose(updates["w"].astype(jnp.float32), 1, rtol=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["fp32", *STORAGES])
def test_16_bit_parameters_inside_of_cond_keep_the_states_dtypes(storage, dtype):
    params = {"w": jnp.ones((64, 128), dtype), "b": jnp.ones(5, dtype)}
    tx = qstate.adamw(optax.linear_schedule(1e-2, 0, 9), weight_decay=0.1, storage=storage)
    guarded = optax.apply_if_finite(tx, 3)
    state = jax.eval_shape(guarded.init, params)
    updates, after = jax.eval_shape(guarded.update, params, state, params)
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    "policy", [None, qstate.every(3), qstate.every(3, kind="soft"), qstate.adaptive()], ids=str
)
@pytest.mark.parametrize("storage", ["fp32", "fp8", "fp4"])
def test_64_bit_mode_changes_no_dtype(storage, policy):
    tx = qstate.adamw(1e-2, storage=storage, reset=policy)
    with jax.enable_x64(True):
        params = {"w": jnp.ones((64, 128), jnp.float32)}
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, state)
    assert updates["w"].dtype == jnp.float32
