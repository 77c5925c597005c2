"""The clock of an average: its age, its mass, when a reset is due, what a reset keeps."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import qstate
from qstate.state import Adaptive, Every, bias_correction, resolve, still, tick
from qstate.state._reset import Monitor


class Clock(NamedTuple):
    age: jnp.ndarray
    mass: jnp.ndarray
    monitor: Monitor | None = None


def _clock(age=0, mass=0.0, monitor=None):
    return Clock(jnp.int32(age), jnp.float32(mass), monitor)


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.0])
@pytest.mark.parametrize("start", [0.0, 0.02])
def test_the_mass_is_the_sum_of_the_weights_given(decay, start):
    mass = start
    for age in range(1, 30):
        mass = decay * mass + (1 - decay)
        now = tick(_clock(age - 1, start), decay, None)
        assert int(now.age) == age
        np.testing.assert_allclose(now.mass, mass, rtol=2e-5)
        np.testing.assert_allclose(
            bias_correction({"w": jnp.float32(3)}, decay, now.age, jnp.float32(start))["w"],
            3 / mass,
            rtol=2e-5,
        )


def test_the_age_stops_at_the_largest_integer():
    largest = np.iinfo(np.int32).max
    assert int(tick(_clock(largest), 0.9, None).age) == largest


@pytest.mark.parametrize("age", range(7))
def test_every_is_due_at_its_period(age):
    assert bool(tick(_clock(age), 0.9, Every(5)).due) == (age + 1 >= 5)


def test_without_a_policy_nothing_is_ever_due():
    now = tick(_clock(10, 0.5), 0.9, None)
    x = jnp.ones(3)
    assert now.due is None
    assert now.kept(x) is x
    assert (int(now.kept_age()), float(now.kept_mass())) == (11, 0.5)


@pytest.mark.parametrize(
    ("kind", "value", "mass"), [("hard", 0, 0), ("soft", 3 / 32, (1 - 0.9**4) / 32)]
)
def test_what_a_reset_keeps(kind, value, mass):
    now = tick(_clock(3), 0.9, Every(4, kind))
    np.testing.assert_array_equal(now.kept(jnp.full(2, 3.0)), np.full(2, value, np.float32))
    assert int(now.kept_age()) == 0
    np.testing.assert_allclose(now.kept_mass(), mass, rtol=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_what_a_step_without_reset_keeps(kind):
    now = tick(_clock(1, 0.02), 0.9, Every(4, kind))
    np.testing.assert_array_equal(now.kept(jnp.full(2, 3.0)), np.full(2, 3, np.float32))
    assert int(now.kept_age()) == 2
    np.testing.assert_allclose(now.kept_mass(), 0.02)


def test_a_hard_reset_drops_what_is_not_finite():
    now = tick(_clock(3), 0.9, Every(4))
    np.testing.assert_array_equal(now.kept(jnp.array([jnp.nan, jnp.inf])), np.zeros(2))


def test_a_clock_that_stands_still():
    now = still(_clock(5, 0.1))
    assert (int(now.age), now.due) == (5, None)


@pytest.mark.parametrize("tolerance", [0.0, 0.3, 0.6])
def test_the_monitor_sums_the_excess_over_the_tolerance(tolerance):
    shares = np.array([0.2, 0.3, 0.6, 0.9, 0.95, 0.5, 1.0])
    monitor = Monitor(jnp.float32(9), jnp.float32(9))  # of the cycle before
    for age, share in enumerate(shares, start=1):
        now = tick(_clock(age - 1), 0.9, None)
        monitor = monitor.observe(jnp.float32(share), now, tolerance)
        stalling = (shares[:age] - shares[0]) / (1 - shares[0])
        excess = np.maximum(0, (stalling - tolerance) / (1 - tolerance)).sum()
        np.testing.assert_allclose(monitor.floor, shares[0], rtol=1e-6)
        np.testing.assert_allclose(monitor.excess, excess, rtol=1e-5, atol=1e-6)


def test_a_monitor_of_an_average_that_never_moves_stays_finite():
    monitor = Monitor.start()
    for age in range(3):
        monitor = monitor.observe(jnp.float32(1), tick(_clock(age), 0.9, None), 0.6)
    assert float(monitor.excess) == 0


def test_a_reset_starts_the_monitor_over():
    now = tick(_clock(3), 0.9, Every(4))
    monitor = Monitor(jnp.float32(0.1), jnp.float32(7)).observe(jnp.float32(0.9), now, 0.6)
    assert float(monitor.excess) == 0
    assert not bool(tick(_clock(0, 0, monitor), 0.9, Adaptive()).due)


@pytest.mark.parametrize("age", [1, 5, 50, 500])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_adaptive_is_due_where_the_mean_excess_passes_what_averaging_lacks(age, decay):
    lacking = 2 * decay**age / (1 + decay**age)
    for factor, due in ((0.99, False), (1.01, True)):
        monitor = Monitor(jnp.float32(0), jnp.float32(age * lacking * factor))
        assert bool(monitor.due(jnp.int32(age), decay)) == due
        now = tick(_clock(age, 0, monitor), decay, Adaptive())
        assert (int(now.age), bool(now.due)) == (age + 1, due)


@pytest.mark.parametrize("policy", [None, Every(3), Adaptive(0.5, "soft")], ids=repr)
def test_policies_with_their_numbers_are_taken_as_they_are(policy):
    assert resolve(policy, qstate.storage("fp8")[1], 0.999) is policy


@pytest.mark.parametrize(
    ("storage", "period"), [("bf16", 1116), ("fp8", 320), ("fp4", 224)], ids=str
)
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_theory_takes_its_period_from_storage_and_decay(storage, period, kind):
    nu = qstate.storage(storage)[1]
    assert resolve(qstate.theory(kind=kind), nu, 0.999) == Every(period, kind)


@pytest.mark.parametrize("decay", [jnp.float32(0.999), np.float32(0.999), 1], ids=type)
def test_theory_takes_a_python_float_only(decay):
    with pytest.raises(TypeError, match="Python float"):
        resolve(qstate.theory(), qstate.storage("fp8")[1], decay)


@pytest.mark.parametrize("policy", [300, "hard", qstate.Block()], ids=str)
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(TypeError, match=r"qstate.every\(300\)"):
        resolve(policy, qstate.storage("fp8")[1], 0.999)


@pytest.mark.parametrize("period", [0, -1, 2.5, True, "300", None])
def test_a_period_is_a_number_of_steps(period):
    with pytest.raises(ValueError, match="1 or more"):
        qstate.every(period)


@pytest.mark.parametrize(
    "factory", [lambda **k: qstate.every(3, **k), qstate.adaptive, qstate.theory]
)
def test_a_reset_is_hard_or_soft(factory):
    with pytest.raises(ValueError, match=r"hard.*soft"):
        factory(kind="medium")
