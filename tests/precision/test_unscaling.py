"""What reaches the optimizer inside: unscaled, in float32, before anything clips it."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

SCALE = 2.0**15


def dynamic(scale=SCALE, **settings):
    return jmp.DynamicLossScale(jnp.float32(scale), **settings)


def seen(gradients, loss_scale=None, jitted=True):
    """The gradients as the inner transformation sees them, and the state after the step."""
    tx = qstate.with_loss_scale(optax.identity(), loss_scale or dynamic())
    update = jax.jit(tx.update) if jitted else tx.update
    return update(gradients, tx.init(jax.tree.map(lambda g: jnp.zeros(g.shape), gradients)))


def assert_same_bits(tree, expected):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# The order: unscale, clip, step.


def test_a_clip_at_1_sees_1():
    tx = qstate.with_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(1.0)), dynamic())
    for gradient, step in [(1.0, -1.0), (0.25, -0.25), (-3.0, 1.0)]:
        updates, _ = jax.jit(tx.update)(jnp.float32(gradient) * SCALE, tx.init(jnp.float32(0)))
        assert float(updates) == step


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_clipped_run_is_that_without_a_scale(dtype):
    """Bit for bit: the scale is a power of two."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    tx = qstate.with_loss_scale(inner, dynamic(period=2))
    params = {"a": jnp.zeros((5, 7)), "b": jnp.zeros(3)}
    state, plain = tx.init(params), inner.init(params)
    rng = np.random.default_rng(0)
    for size in (0.01, 0.1, 1.0, 10.0, 0.1):
        draw = lambda p, size=size: jnp.asarray(size * rng.normal(size=p.shape), dtype)  # noqa: E731
        g = jax.tree.map(draw, params)
        scaled = qstate.loss_scale(state).scale(jax.tree.map(lambda g: g.astype(jnp.float32), g))
        expected, plain = jax.jit(inner.update)(
            jax.tree.map(lambda g: g.astype(jnp.float32), g), plain
        )
        updates, state = jax.jit(tx.update)(scaled, state)
        assert_same_bits((updates, state.inner_state), (expected, plain))
    assert float(state.scaler.value) == 4 * SCALE


@pytest.mark.filterwarnings("ignore:1 link of the chain")
def test_a_clip_before_the_scale_is_one_at_a_fraction():
    """What the wrong order does, which the package warns of."""
    tx = optax.chain(optax.clip(1.0), qstate.with_loss_scale(optax.sgd(1.0), dynamic()))
    updates, _ = tx.update(jnp.float32(0.5) * SCALE, tx.init(jnp.float32(0)))
    assert float(updates) == -1.0 / SCALE


# Dtypes.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize(
    "loss_scale",
    [dynamic(), jmp.StaticLossScale(SCALE), dynamic(3.0), jmp.NoOpLossScale()],
    ids=["dynamic", "static", "not-a-power-of-two", "none"],
)
def test_gradients_are_divided_in_float32(dtype, loss_scale):
    scaled = jnp.asarray([1.0, -3.0, 100.0, 2.0**-14, -0.0, 60000.0, 1e-5], dtype)
    for jitted in (True, False):
        unscaled, state = seen(scaled, loss_scale, jitted)
        assert unscaled.dtype == jnp.float32
        exact = np.asarray(scaled, np.float64) / float(state.scaler.value)
        np.testing.assert_allclose(np.asarray(unscaled, np.float64), exact, rtol=2.0**-22)
        assert np.signbit(unscaled[4])
        if loss_scale.loss_scale != 3:
            np.testing.assert_array_equal(np.asarray(unscaled, np.float64), exact)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
def test_gradients_in_8_bits(dtype):
    unscaled, _ = seen(jnp.asarray([1.0, -2.0], dtype))
    np.testing.assert_array_equal(unscaled, np.float32([1.0, -2.0]) / SCALE)
    _, state = seen(jnp.asarray([1.0, np.nan], dtype))
    assert int(state.total_notfinite) == 1


def test_complex_gradients():
    unscaled, _ = seen(jnp.asarray([SCALE - 2j * SCALE], jnp.complex64))
    np.testing.assert_array_equal(unscaled, np.complex64([1 - 2j]))


@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, np.inf)], ids=str)
def test_complex_gradients_are_looked_at(bad):
    _, state = seen(jnp.asarray([1, bad], jnp.complex64))
    assert int(state.total_notfinite) == 1


def test_64_bits():
    with jax.enable_x64(True):
        unscaled, _ = seen(jnp.asarray([1 + 2.0**-40, 1e300], jnp.float64))
        assert unscaled.dtype == jnp.float64
        np.testing.assert_array_equal(unscaled * SCALE, [1 + 2.0**-40, 1e300])


# What counts as infinite.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
def test_one_number_of_any_leaf_is_found(dtype, bad):
    shapes = {"a": (), "b": (3, 5, 2), "c": (129,)}
    for name, shape in shapes.items():
        for place in {0, int(np.prod(shape)) - 1}:
            tree = {n: np.ones(s, np.float32) for n, s in shapes.items()}
            tree[name] = tree[name].reshape(-1)
            tree[name][place] = bad
            tree[name] = tree[name].reshape(shape)
            _, state = seen(jax.tree.map(lambda x: jnp.asarray(x, dtype), tree), jitted=False)
            assert int(state.total_notfinite) == 1, (name, place)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_largest_number_is_finite(dtype):
    """And so are two whose sum is not."""
    largest = jnp.finfo(dtype).max
    _, state = seen(jnp.asarray([largest, largest, -largest, 0.0], dtype), dynamic(1.0))
    assert int(state.total_notfinite) == 0


def test_what_overflows_while_it_is_divided_is_skipped():
    loss_scale = dynamic(0.25, min_loss_scale=jnp.float32(0.25))
    updates, state = seen(jnp.float32([3e38, 1.0]), loss_scale)
    assert int(state.total_notfinite) == 1
    np.testing.assert_array_equal(updates, -0.0)
    updates, _ = seen(jnp.float32([3e37, 1.0]), loss_scale)
    np.testing.assert_array_equal(updates, np.float32([3e37, 1.0]) * 4)


# Leaves of all kinds.


def test_leaves_of_all_kinds():
    gradients = {
        "half": jnp.full((2, 3), SCALE, jnp.float16),
        "int": jnp.array([2**31 - 1, -7], jnp.int32),
        "bool": jnp.array([True, False]),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(-SCALE),
        "nested": [(jnp.ones(1) * SCALE,), ()],
    }
    for bad in (False, True):
        given = {**gradients, "scalar": jnp.float32(np.nan)} if bad else gradients
        for jitted in (True, False):
            unscaled, state = seen(given, jitted=jitted)
            assert jax.tree.structure(unscaled) == jax.tree.structure(gradients)
            assert int(state.total_notfinite) == bad
            assert {str(x.dtype) for x in jax.tree.leaves(unscaled)} == {"float32", "int32", "bool"}
            assert unscaled["empty"].shape == (0, 3)
            np.testing.assert_array_equal(unscaled["half"], -0.0 if bad else 1.0)
            np.testing.assert_array_equal(unscaled["scalar"], -0.0 if bad else -1.0)
            np.testing.assert_array_equal(unscaled["int"], 0 if bad else [2**31 - 1, -7])
            assert bool(unscaled["bool"][0]) is not bad


@pytest.mark.parametrize("bad", [False, True], ids=["taken", "skipped"])
def test_apply_updates_on_leaves_of_all_kinds(bad):
    """int and None leaves beside ones that train, masked out or not."""
    params = {"w": jnp.array([1.0, -0.0]), "n": jnp.array([3, 4]), "none": None}
    gradients = {"w": jnp.full(2, SCALE), "n": jnp.zeros(2, jnp.int32), "none": None}
    gradients["w"] = gradients["w"].at[0].set(np.inf if bad else SCALE)
    mask = {"w": True, "n": False, "none": None}
    for inner in (optax.sgd(0.5), optax.masked(optax.adam(0.5), mask)):
        tx = qstate.with_loss_scale(inner, dynamic())
        updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
        after = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(after["n"], [3, 4])
        assert after["n"].dtype == jnp.int32
        assert after["none"] is None
        if bad:
            assert_same_bits(after, params)
        else:
            np.testing.assert_allclose(after["w"], [0.5, -0.5], rtol=1e-4)


def test_masked_from_outside():
    tx = optax.masked(qstate.with_loss_scale(optax.sgd(1.0), dynamic()), {"w": True, "n": False})
    params = {"w": jnp.float32(0), "n": jnp.int32(3)}
    state = tx.init(params)
    gradients = {"w": jnp.float32(SCALE), "n": jnp.int32(5)}
    updates, state = jax.jit(tx.update)(gradients, state, params)
    assert (float(updates["w"]), int(updates["n"])) == (-1.0, 5)
    assert float(qstate.loss_scale(state).loss_scale) == SCALE


def test_gradients_of_int_parameters():
    """`jax.grad` gives them the dtype float0, which no arithmetic takes."""
    params = {"n": jnp.arange(3), "w": jnp.ones(3)}
    grad = jax.grad(lambda p: SCALE * jnp.sum(p["w"]), allow_int=True)
    tx = qstate.with_loss_scale(optax.masked(optax.sgd(1.0), {"n": False, "w": True}), dynamic())
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(grad(params), tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], -1.0)


@pytest.mark.parametrize("tree", [{}, (), None], ids=repr)
def test_nothing_to_train(tree):
    tx = qstate.with_loss_scale(optax.adam(1e-3), dynamic())
    updates, state = tx.update(tree, tx.init(tree), tree)
    assert updates == tree
    assert int(state.scaler.counter) == 1


# Parameters of 16 bits.

INNER = {
    "adam": lambda: optax.adam(1e-2),
    "adam-mu-bf16": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1e-2),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"b": "a", "w": "b"}
    ),
    "qstate-fp8": lambda: qstate.adamw(1e-2, exempt=lambda path, leaf: False),
    "apply-if-finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.filterwarnings("ignore:parameters in 16 bits")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER.keys())
def test_states_for_16_bit_parameters_do_not_change_their_dtypes(make, dtype):
    tx = qstate.with_loss_scale(make(), dynamic())
    params = {"b": jnp.ones(8, dtype), "w": jnp.ones((8, 16), dtype)}
    state = tx.init(params)
    for g in (params, {**params, "b": params["b"] * jnp.inf}):
        updates, after = jax.eval_shape(tx.update, g, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert [x.dtype for x in jax.tree.leaves(after)] == [
            x.dtype for x in jax.tree.leaves(state)
        ]
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


@pytest.mark.filterwarnings("ignore:parameters in 16 bits")
def test_moments_of_float16_parameters_are_float32_from_the_start():
    tx = qstate.with_loss_scale(optax.adam(1e-2), dynamic())
    params = jnp.ones(4, jnp.float16)
    state = tx.init(params)
    adam = state.inner_state[0]
    assert adam.mu.dtype == adam.nu.dtype == jnp.float32
    # Zero gradients are no 0/0, and small ones do not vanish when squared.
    gradients = jnp.float16([0.0, SCALE, SCALE * 2.0**-13, -0.0])
    updates, state = jax.jit(tx.update)(gradients, state, params)
    np.testing.assert_allclose(updates, [0.0, -1e-2, -1e-2, 0.0], rtol=1e-3)
    np.testing.assert_allclose(state.inner_state[0].nu[2], 1e-3 * 2.0**-26, rtol=1e-6)


def test_hyperparameters_of_bf16_parameters_are_not_rounded():
    tx = qstate.with_loss_scale(optax.inject_hyperparams(optax.adam)(1e-3), dynamic())
    state = tx.init(jnp.ones(4, jnp.bfloat16))
    assert float(state.inner_state.hyperparams["b2"]) == np.float32(0.999)


@pytest.mark.filterwarnings("ignore:parameters in 16 bits")
def test_a_key_in_the_state_for_bf16_parameters():
    tx = qstate.with_loss_scale(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), dynamic())
    params = jnp.ones(4, jnp.bfloat16)
    jax.jit(tx.update)(params, tx.init(params), params)


# Arguments.


def test_extra_arguments_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    tx = qstate.with_loss_scale(optax.chain(optax.sgd(1.0), plateau), dynamic(8.0))
    state = tx.init(jnp.float32(0))
    step = jax.jit(lambda g, state, value: tx.update(g, state, value=value))
    rates = []
    # Every step whose value is no smaller than the first one's halves the rate, unless skipped.
    for g, value in [(1, 1.0), (np.nan, 1.0), (1, 1.0), (np.inf, np.nan), (1, 1.0), (1, 1.0)]:
        _, state = step(jnp.float32(g), state, value)
        rates.append(float(state.inner_state[1].scale))
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]


def test_extra_arguments_that_the_inner_one_does_not_take():
    tx = qstate.with_loss_scale(optax.sgd(1.0), dynamic())
    updates, _ = tx.update(jnp.float32(SCALE), tx.init(jnp.float32(0)), value=3.0, note="x")
    assert float(updates) == -1.0


def test_tree_map_params_sees_the_inner_averages():
    tx = qstate.with_loss_scale(optax.adam(1e-3), dynamic())
    state = tx.init(jnp.ones(3))
    marked = optax.tree.map_params(tx, lambda x: x + 1, state)
    adam = marked.inner_state[0]
    np.testing.assert_array_equal((adam.mu, adam.nu), 1.0)
    assert (int(adam.count), float(marked.scaler.value)) == (0, SCALE)
