"""Small inputs that made optimizers with states in few bits fail, each with what is right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate
from qstate.numerics import encode

RECIPES = ["bf16", "fp8", "fp4", "int8", "int4"]
recipes = pytest.mark.parametrize("name", RECIPES)
SHAPE = (32, 256)


def nothing(path, leaf):
    """An ``exempt`` that exempts no leaf."""
    return False


def adam(name, **settings):
    mu_storage, nu_storage = qstate.storage(name)
    return qstate.scale_by_adam(
        mu_storage=mu_storage, nu_storage=nu_storage, exempt=nothing, **settings
    )


def run(tx, params, gradient_of, steps):
    """Parameters and state after ``steps`` steps; ``gradient_of(key)`` draws a gradient."""

    def step(carry, key):
        params, state = carry
        updates, state = tx.update(gradient_of(key), state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), steps)
    return jax.jit(lambda p, s: jax.lax.scan(step, (p, s), keys)[0])(params, tx.init(params))


@recipes
def test_zeros_are_still_zeros_after_1000_steps_without_gradient(name):
    params = jnp.ones(SHAPE)
    tx = qstate.adam(1e-3, storage=name, exempt=nothing)
    params, state = run(tx, params, lambda key: jnp.zeros(SHAPE), 1000)
    np.testing.assert_array_equal(params, 1.0)
    read = qstate.dequantize(state)[0]
    np.testing.assert_array_equal(read.mu, 0.0)
    np.testing.assert_array_equal(read.nu, 0.0)
    for part in jax.tree.leaves((state[0].mu.codes, state[0].nu.codes)):
        assert not any(np.asarray(part).tobytes())


@recipes
def test_a_coordinate_without_gradient_does_not_move(name):
    """Beside coordinates that have one, in the same blocks, rows and columns."""
    still = jnp.zeros(SHAPE, bool).at[3, 7].set(True).at[20, 128:].set(True).at[:, 11].set(True)
    tx = qstate.adam(1e-3, storage=name, exempt=nothing)
    params, state = run(
        tx,
        jnp.full(SHAPE, 0.5),
        lambda key: jnp.where(still, 0.0, jax.random.normal(key, SHAPE)),
        500,
    )
    params = np.asarray(params)
    np.testing.assert_array_equal(params[still], 0.5)
    assert (params[~still] != 0.5).all()
    np.testing.assert_array_equal(np.asarray(qstate.dequantize(state)[0].mu)[still], 0.0)


def with_averages(state, m, v):
    """A state whose averages are old, and hold ``m`` and ``v``."""

    def held(average, x):
        codes, scales = encode(x, average.storage, 1)
        return dataclasses.replace(average, codes=codes, scales=scales, age=jnp.int32(10**5))

    return state._replace(mu=held(state.mu, m), nu=held(state.nu, v))


SECOND_MOMENTS = {
    "fp4": qstate.storage("fp4")[1],
    "int4": qstate.storage("int4")[1],
    "fp8": qstate.storage("fp8")[1],
    "int8": qstate.storage("int8")[1],
    "e2m1": qstate.Storage(qstate.E2M1, qstate.Block(128), "stochastic"),
    "ue2m2": qstate.Storage(qstate.UE2M2, qstate.Block(128), "stochastic"),
    "dynamic4": qstate.Storage(qstate.DYNAMIC4, qstate.Block(128, "bfloat16"), "stochastic"),
    "e4m3-power-of-two": qstate.Storage(
        qstate.E4M3, qstate.Block(128, "power_of_two"), "stochastic"
    ),
}


@pytest.mark.parametrize("nu_storage", SECOND_MOMENTS.values(), ids=SECOND_MOMENTS.keys())
def test_one_large_second_moment_in_a_block_of_small_ones(nu_storage):
    """v = 1.0 once and 1e-6 elsewhere, m = 1e-3: a step is of the order of the learning rate."""
    m = jnp.full(SHAPE, 1e-3)
    v = jnp.full(SHAPE, 1e-6).at[::4, ::64].set(1.0)
    tx = qstate.scale_by_adam(
        mu_storage=qstate.storage("fp8")[0], nu_storage=nu_storage, exempt=nothing
    )
    state = with_averages(tx.init(m), m, v)
    updates, _ = tx.update(jnp.zeros(SHAPE), state)
    assert np.abs(updates).max() < 3


@recipes
def test_second_moments_near_1e_17(name):
    """Gradients of 1e-7 and less: their squares' average is neither lost nor raised to a floor."""
    shape = (16, 256)
    g = 1e-7 * jax.random.uniform(jax.random.key(0), shape, minval=0.8, maxval=1.0)
    tx, exact = adam(name, eps=0.0), optax.scale_by_adam(eps=0.0)
    state, exact_state = tx.init(g), exact.init(g)
    for _ in range(3):
        updates, state = tx.update(g, state)
        exact_updates, exact_state = exact.update(g, exact_state)
    v = qstate.dequantize(state).nu
    assert float(jnp.min(v)) > 0
    np.testing.assert_allclose(v, exact_state.nu, rtol=0.75)
    np.testing.assert_allclose(updates, exact_updates, rtol=0.75)


@recipes
def test_two_equal_leaves_have_different_bits(name):
    g = jax.random.normal(jax.random.key(0), SHAPE)
    tx = adam(name)
    tree = {"a": g, "b": g}
    _, state = tx.update(tree, tx.init(tree))
    for average in (state.mu, state.nu):
        assert (np.asarray(average.codes["a"]) != np.asarray(average.codes["b"])).any()


def test_the_two_moments_and_two_steps_have_different_bits():
    """b1 = b2 and g = 1 make both moments the same numbers; b = 0 the same in every step."""
    e4m3 = qstate.Storage(qstate.E4M3, rounding="stochastic")
    g = jnp.ones(SHAPE)
    tx = qstate.scale_by_adam(b1=0.9, b2=0.9, mu_storage=e4m3, nu_storage=e4m3, exempt=nothing)
    _, state = tx.update(g, tx.init(g))
    mu, nu = np.asarray(state.mu.codes), np.asarray(state.nu.codes)
    assert set(np.unique(mu)) == set(np.unique(nu))
    assert 0.3 < (mu != nu).mean() < 0.6
    tx = qstate.scale_by_adam(b1=0.0, b2=0.9, mu_storage=e4m3, nu_storage=e4m3, exempt=nothing)
    g = jnp.full(SHAPE, 1.06)
    _, first = tx.update(g, tx.init(g))
    _, second = tx.update(g, first)
    assert 0.3 < (np.asarray(first.mu.codes) != np.asarray(second.mu.codes)).mean() < 0.7
