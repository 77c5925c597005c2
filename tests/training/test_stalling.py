"""Stored second moments under Gaussian gradients, against the theory and against float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qstate

COORDINATES = (1000, 1000)
LATE = 10**6  # an age at which bias correction is 1


def variances():
    """Variances over six octaves, so that mantissas are log-uniform as in the theory."""
    return jnp.exp2(jax.random.uniform(jax.random.key(5), COORDINATES, minval=-3.0, maxval=3.0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def simulate(storage, b2, steps, state):
    """Runs Adam on Gaussian gradients; the last state and the stalled fraction in every step."""
    tx = qstate.scale_by_adam(b2=b2, nu_storage=storage)
    sigma = jnp.sqrt(variances())

    def step(state, key):
        gradient = sigma * jax.random.normal(key, COORDINATES)
        _, after = tx.update(gradient, state)
        return after, qstate.stall_fraction(state, after)["nu"]

    return jax.lax.scan(step, state, jax.random.split(jax.random.key(11), steps))


def at_rest(storage, b2):
    """A state whose second moment is what a float32 average fluctuates to, rounded."""
    state = qstate.scale_by_adam(b2=b2, nu_storage=storage).init(variances())
    spread = np.sqrt(2 * (1 - b2) / (1 + b2))
    nu = variances() * (1 + spread * jax.random.normal(jax.random.key(7), COORDINATES))
    codes, scales = qstate.numerics.encode(nu, state.nu.storage, key=13)
    nu = dataclasses.replace(state.nu, codes=codes, scales=scales, age=jnp.int32(LATE))
    return state._replace(nu=nu)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a second moment in")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", [qstate.BF16, qstate.E4M3], ids=str)
@pytest.mark.parametrize("b2", [0.99, 0.999])
def test_stalled_fraction_on_a_fixed_grid_is_the_theorys(b2, format, rounding):
    storage = qstate.Storage(format, qstate.NoScale(), rounding)
    _, stalled = simulate(storage, b2, 400, at_rest(storage, b2))
    predicted = qstate.theory.stall_probability(format, b2, rounding)
    assert float(stalled[-50:].mean()) == pytest.approx(predicted, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("b2", [0.99, 0.999])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "int8"])
def test_second_moment_is_unbiased_under_stochastic_rounding(recipe, b2):
    assert stored_over_expected(recipe, b2) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "largest"), [("fp4", 1.05), ("int4", 1.15)])
def test_four_bit_grids_without_zero_lift_the_smallest_of_a_block(recipe, largest):
    # What lies below the smallest code is stored as that code: 1/784 of a block's largest in fp4,
    # 1/16 of a row's or column's in int4. Here variances in a block differ by a factor of 64.
    assert 1 <= stored_over_expected(recipe, 0.99) < largest


def stored_over_expected(recipe, b2, steps=300):
    """Mean of the stored second moment over σ²φ, the mean of the float32 average."""
    storage = qstate.storage(recipe)[1]
    tx = qstate.scale_by_adam(b2=b2, nu_storage=storage)
    state, _ = simulate(storage, b2, steps, tx.init(variances()))
    mean = float(jnp.mean(qstate.dequantize(state).nu) / jnp.mean(variances()))
    return mean / (1 - b2**steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a second moment in")
def test_second_moment_is_stuck_under_nearest_rounding_with_power_of_two_scales():
    b2, steps = 0.999, 1500
    storage = qstate.Storage(qstate.E4M3, qstate.Block(128, "power_of_two"), "nearest")
    tx = qstate.scale_by_adam(b2=b2, nu_storage=storage)
    state, _ = simulate(storage, b2, steps, tx.init(variances()))
    mean = float(jnp.mean(qstate.dequantize(state).nu / variances()))
    assert mean / (1 - b2**steps) < 0.5


def steps_to_recover(storage, b2, limit):
    """Steps from a tenfold drop of σ until the average's mean is within 2x of the new σ²."""
    tx = qstate.scale_by_adam(b2=b2, nu_storage=storage)
    shape = (64, 256)

    def step(state, key_and_sigma):
        key, sigma = key_and_sigma
        _, state = tx.update(sigma * jax.random.normal(key, shape), state)
        nu = qstate.dequantize(state).nu
        return state, jnp.mean(nu) / (1 - b2**state.nu.age)

    before = 1000
    sigma = jnp.where(jnp.arange(before + limit) < before, 1.0, 0.1)
    keys = jax.random.split(jax.random.key(3), before + limit)
    _, mean = jax.jit(lambda s: jax.lax.scan(step, s, (keys, sigma)))(tx.init(jnp.zeros(shape)))
    recovered = np.flatnonzero(np.asarray(mean[before:]) < 2 * 0.1**2)
    return int(recovered[0]) if recovered.size else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a second moment in")
@pytest.mark.parametrize(
    "scaling", [qstate.NoScale(), qstate.Block(128), qstate.Block(128, "power_of_two")], ids=str
)
def test_only_stochastic_rounding_follows_a_tenfold_drop(scaling):
    b2, limit = 0.99, 1500
    exact = steps_to_recover(qstate.Storage(qstate.F32), b2, limit)
    stochastic = steps_to_recover(qstate.Storage(qstate.E4M3, scaling, "stochastic"), b2, limit)
    assert exact is not None
    assert stochastic == pytest.approx(exact, rel=0.05)
    if isinstance(scaling, qstate.NoScale) or scaling.scale == "power_of_two":
        assert steps_to_recover(qstate.Storage(qstate.E4M3, scaling), b2, limit) is None
