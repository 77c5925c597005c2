"""What a state is said to hold: rows, bytes, and plain float32 trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"dense": {"bias": draw(128), "kernel": draw(64, 128)}, "ids": jnp.arange(9), "no": None}


@pytest.fixture(scope="module")
def state(params):
    tx = qstate.adamw(1e-3, storage="fp4")
    return jax.jit(tx.update)(params, tx.init(params), params)[1]


def test_a_row_for_every_leaf_of_every_average(state):
    assert [tuple(row) for row in qstate.describe(state)] == [
        ("0/count", (), "int32", 4),
        ("0/mu/dense/bias", (128,), "f32", 512),
        ("0/mu/dense/kernel", (64, 128), "e2m1, block 128, stochastic", 4096 + 256),
        ("0/mu", (), "age and mass", 8),
        ("0/nu/dense/bias", (128,), "f32", 512),
        (
            "0/nu/dense/kernel",
            (64, 128),
            "ue2m2 without zero, block 128, stochastic, square root",
            4096 + 256,
        ),
        ("0/nu", (), "age and mass", 8),
        ("0/key", (2,), "uint32", 8),
    ]


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("reset", [None, qstate.adaptive()], ids=["none", "adaptive"])
def test_bytes_are_those_of_the_arrays(storage, reset, params):
    state = qstate.adamw(1e-3, storage=storage, reset=reset).init(params)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert qstate.nbytes(state) == total
    assert sum(row.bytes for row in qstate.describe(state)) == total


def test_bytes_of_optaxs_own_state(params):
    weights = {"dense": params["dense"]}
    state = optax.adam(1e-3).init(weights)
    assert qstate.nbytes(state) == 4 + 2 * 4 * (128 + 64 * 128)
    assert [row.path for row in qstate.describe(state)] == [
        "0/count",
        "0/mu/dense/bias",
        "0/mu/dense/kernel",
        "0/nu/dense/bias",
        "0/nu/dense/kernel",
    ]


def test_bytes_of_a_state_that_does_not_exist_yet(params):
    tx = qstate.adamw(1e-3, storage="int4")
    assert qstate.nbytes(jax.eval_shape(tx.init, params)) == qstate.nbytes(tx.init(params))


def test_a_state_that_does_not_exist_yet_is_described(params):
    tx = qstate.adamw(1e-3)
    assert qstate.describe(jax.eval_shape(tx.init, params)) == qstate.describe(tx.init(params))


def test_a_state_with_a_python_number_is_described(params):
    state = (qstate.adamw(1e-3).init(params), {"step": 3})
    assert len(qstate.describe(state)) == len(qstate.describe(state[0])) + 1


def test_states_inside_of_wrappers_are_found(params):
    tx = optax.MultiSteps(qstate.quantize_state(optax.adam(1e-3), "fp8"), 2)
    rows = {row.path: row for row in qstate.describe(tx.init({"dense": params["dense"]}))}
    kernel = rows["inner_opt_state/inner_state/0/mu/dense/kernel"]
    assert (kernel.storage, kernel.bytes) == ("e4m3, block 128, stochastic", 8192 + 256)
    assert rows["acc_grads/dense/kernel"].storage == "float32"


def test_a_single_array_has_no_path_of_its_own():
    rows = qstate.describe(qstate.adam(1e-3).init(jnp.ones((64, 128))))
    assert [row.path for row in rows][:3] == ["0/count", "0/mu", "0/mu"]


def test_the_table_is_aligned_and_has_a_total(state):
    lines = str(qstate.describe(state)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["path", "shape", "storage", "bytes"]
    assert lines[-1].split() == ["total", f"{qstate.nbytes(state):,}"]
    assert len(lines) == len(qstate.describe(state)) + 4


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8", "fp4", "int8", "int4"])
def test_dequantized_averages_are_what_the_next_step_reads(storage, params):
    mu, nu = qstate.storage(storage)
    tx = qstate.scale_by_adam(b1=0.5, mu_storage=mu, nu_storage=nu)
    step = jax.jit(tx.update)
    _, state = step(params, tx.init(params))
    plain = qstate.dequantize(state)
    assert plain.count is state.count
    assert plain.key is state.key
    assert plain.mu["no"] is None
    assert plain.mu["ids"] is None
    kernel, momentum = params["dense"]["kernel"], plain.mu["dense"]["kernel"]
    assert (momentum.dtype, momentum.shape) == (jnp.float32, kernel.shape)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = step(zeros, state)
    direction = 0.5 * momentum / (1 - 0.5**2)
    v_hat = 0.999 * plain.nu["dense"]["kernel"] / (1 - 0.999**2)
    expected = direction / (np.sqrt(v_hat) + 1e-8)
    np.testing.assert_allclose(updates["dense"]["kernel"], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("storage", "relative"), [("bf16", 2**-7), ("fp8", 2**-3), ("int8", 0.2)], ids=str
)
def test_dequantized_values_are_near_the_average(storage, relative, params):
    tx = qstate.adamw(1e-3, storage=storage)
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    exact = 0.1 * np.asarray(params["dense"]["kernel"])
    held = np.asarray(qstate.dequantize(state)[0].mu["dense"]["kernel"])
    large = np.abs(exact) > 0.05 * np.abs(exact).max()
    np.testing.assert_allclose(held[large], exact[large], rtol=relative)


def test_a_state_without_averages_is_its_own_dequantization(params):
    state = optax.adam(1e-3).init(params["dense"])
    jax.tree.map(np.testing.assert_array_equal, qstate.dequantize(state), state)


def test_dequantize_under_jit_and_vmap(state, params):
    jitted, eager = jax.jit(qstate.dequantize)(state), qstate.dequantize(state)
    assert jax.tree.structure(jitted) == jax.tree.structure(eager)
    for a, b in zip(jax.tree.leaves(jitted), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    members = jax.vmap(qstate.adamw(1e-3).init, in_axes=None, axis_size=3)(params)
    assert jax.vmap(qstate.dequantize)(members)[0].mu["dense"]["kernel"].shape == (3, 64, 128)
