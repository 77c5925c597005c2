"""Adam in float32 storage is optax's; in few bits it is the same rule on rounded averages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate

STEPS = 20


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "frozen": None,
        "layers": [{"bias": draw(7), "kernel": draw(70, 130)}, {"kernel": draw(3, 5, 2)}],
        "scale": draw(),
    }


@pytest.fixture(scope="module")
def gradients(params):
    rng = np.random.default_rng(1)
    draw = lambda p: jnp.asarray(rng.normal(size=p.shape) * 10 ** rng.uniform(-4, 2), p.dtype)  # noqa: E731
    return [jax.tree.map(draw, params) for _ in range(STEPS)]


PAIRS = {
    "adamw": (
        lambda: qstate.adamw(1e-3, weight_decay=0.1, storage="fp32"),
        lambda: optax.adamw(1e-3, weight_decay=0.1),
    ),
    "adamw-nesterov": (
        lambda: qstate.adamw(1e-3, storage="fp32", nesterov=True),
        lambda: optax.adamw(1e-3, nesterov=True),
    ),
    "adamw-betas-and-masks": (
        lambda: qstate.adamw(
            1e-3, 0.8, 0.95, 1e-6, 1e-7, 0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            storage="fp32",
        ),
        lambda: optax.adamw(
            1e-3, 0.8, 0.95, 1e-6, 1e-7, weight_decay=0.1,
            mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        ),
    ),
    "adam-schedule": (
        lambda: qstate.adam(optax.linear_schedule(1e-2, 0, STEPS), storage="fp32"),
        lambda: optax.adam(optax.linear_schedule(1e-2, 0, STEPS)),
    ),
    "scale_by_adam": (lambda: qstate.scale_by_adam(), lambda: optax.scale_by_adam()),
    "scale_by_adam-nesterov": (
        lambda: qstate.scale_by_adam(nesterov=True),
        lambda: optax.scale_by_adam(nesterov=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_eager_float32_equals_optax_bit_for_bit(pair, params, gradients):
    for updates, expected in _side_by_side(pair, params, gradients, jit=False):
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_jitted_float32_is_within_an_ulp_of_optax(pair, params, gradients):
    for updates, expected in _side_by_side(pair, params, gradients, jit=True):
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), maxulp=1)


def test_float32_state_is_optaxs(params, gradients):
    tx, plain = qstate.scale_by_adam(), optax.scale_by_adam()
    state, expected = tx.init(params), plain.init(params)
    for g in gradients[:3]:
        state, expected = tx.update(g, state)[1], plain.update(g, expected)[1]
    held = qstate.dequantize(state)
    assert int(held.count) == int(expected.count) == int(state.mu.age) == int(state.nu.age)
    for name in ("mu", "nu"):
        jax.tree.map(np.testing.assert_array_equal, getattr(held, name), getattr(expected, name))


def test_the_step_uses_the_fresh_averages_and_keeps_the_rounded(params):
    # From zero the first direction is the sign of the gradient, in however few bits.
    tx = qstate.adam(1.0, eps=0.0, storage="fp4")
    rng = np.random.default_rng(2)
    g = {"w": jnp.asarray(np.exp(rng.normal(size=(64, 128), scale=3)), jnp.float32)}
    updates, state = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_allclose(updates["w"], -1, rtol=1e-4)
    kept = qstate.dequantize(state)[0].mu["w"]
    assert float(jnp.mean(kept == 0.1 * g["w"])) < 0.1


@pytest.mark.parametrize("storage", ["bf16", "fp8", "fp4", "int8", "int4"])
def test_a_second_moment_is_kept_without_zero(storage):
    tx = qstate.adam(1.0, storage=storage)
    g = {"w": jnp.full((64, 128), 1e-3).at[0].set(1.0)}  # v from 1e-6 to 1
    _, state = jax.jit(tx.update)(g, tx.init(g))
    assert float(jnp.min(qstate.dequantize(state)[0].nu["w"])) > 0


@pytest.mark.parametrize(
    "format", [qstate.E4M3, qstate.E2M1, qstate.INT8, qstate.DYNAMIC8, qstate.DYNAMIC4], ids=str
)
def test_a_second_moment_has_no_zero_in_a_format_that_has_one(format):
    held = qstate.Storage(format, qstate.Block(128), "stochastic")
    tx = qstate.scale_by_adam(nu_storage=held)
    g = {"w": jnp.full((64, 128), 1e-5).at[:, 0].set(1.0)}  # v from 1e-10 to 1
    _, state = jax.jit(tx.update)(g, tx.init(g))
    nu = qstate.dequantize(state).nu["w"]
    assert float(jnp.min(nu)) > 0
    updates, _ = jax.jit(tx.update)(g, state)
    assert float(jnp.max(jnp.abs(updates["w"]))) < 2


@pytest.mark.parametrize("storage", ["bf16", "fp8", "fp4", "int8", "int4"])
def test_what_never_had_a_gradient_does_not_move(storage):
    tx = qstate.adam(1e-2, storage=storage)
    rng = np.random.default_rng(3)
    p = {"w": jnp.zeros((64, 128))}
    state, step = tx.init(p), jax.jit(tx.update)
    for _ in range(20):
        g = rng.normal(size=(64, 128))
        g[:, ::2] = 0
        updates, state = step({"w": jnp.asarray(g, jnp.float32)}, state)
        p = optax.apply_updates(p, updates)
    assert not np.any(p["w"][:, ::2])
    assert np.all(p["w"][:, 1::2])


@pytest.mark.parametrize("name", ["b1", "b2", "eps", "eps_root"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factory", [qstate.scale_by_adam, qstate.adam, qstate.adamw])
def test_hyperparameters_in_16_bits_are_refused(factory, name, dtype):
    rate = () if factory is qstate.scale_by_adam else (1e-3,)
    with pytest.raises(ValueError, match=f"{name} arrives as {dtype}.*hyperparam_dtype"):
        factory(*rate, **{name: jnp.asarray(0.999, dtype)})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param({"storage": "fp6"}, ValueError, "fp8", id="unknown-recipe"),
        pytest.param({"storage": None}, TypeError, "pair of qstate.Storage", id="no-storage"),
        pytest.param({"storage": qstate.storage("fp8")[0]}, TypeError, "pair", id="one-storage"),
        pytest.param({"storage": (qstate.E4M3,) * 2}, TypeError, "pair", id="formats"),
        pytest.param(
            {"storage": (qstate.Storage(qstate.UE2M2, qstate.Block(128)),) * 2},
            ValueError,
            "first moment has values of both signs",
            id="unsigned-first-moment",
        ),
        pytest.param(
            {"storage": (qstate.Storage(qstate.E4M3, qstate.Block(128), domain="sqrt"),) * 2},
            ValueError,
            "both signs",
            id="square-root-of-a-first-moment",
        ),
        pytest.param({"key": 0.5}, TypeError, "a key is an integer", id="float-key"),
    ],
)
def test_bad_settings_are_refused_early(settings, error, message):
    with pytest.raises(error, match=message):
        qstate.adamw(1e-3, **settings).init({"w": jnp.ones((64, 128))})


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="w is complex"):
        qstate.adamw(1e-3).init({"w": jnp.ones(3, jnp.complex64)})


def test_paths_given_to_exempt_read_like_a_file_path(params):
    seen = []
    tx = qstate.scale_by_adam(
        nu_storage=qstate.storage("fp8")[1], exempt=lambda path, leaf: seen.append(path)
    )
    tx.init(params)
    assert seen == ["layers/0/bias", "layers/0/kernel", "layers/1/kernel", "scale"]


def test_exempt_leaves_stay_float32(params):
    tx = qstate.adam(1e-3, exempt=lambda path, leaf: path.endswith("kernel"))
    nu = tx.init(params)[0].nu
    kernel, bias = nu.codes["layers"][0]["kernel"], nu.codes["layers"][0]["bias"]
    assert (kernel.dtype, bias.dtype) == (jnp.float32, jnp.uint8)


def _side_by_side(pair, params, gradients, jit):
    tx, plain = (make() for make in pair)
    update, plain_update = (
        (jax.jit(tx.update), jax.jit(plain.update)) if jit else (tx.update, plain.update)
    )
    state, plain_state, p = tx.init(params), plain.init(params), params
    for g in gradients:
        updates, state = update(g, state, p)
        expected, plain_state = plain_update(g, plain_state, p)
        yield updates, expected
        p = optax.apply_updates(p, expected)
