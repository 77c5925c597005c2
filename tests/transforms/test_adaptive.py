"""The adaptive policy, replayed in NumPy from the stalled fractions that were measured."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qstate

DECAY, STEPS = 0.99, 260


class Replay:
    """The rule as written: reset at the end of the step after the one with S̄(k) > E(k)."""

    def __init__(self, decay, tolerance):
        self.decay, self.tolerance = decay, tolerance
        self.start_over()

    def start_over(self):
        self.stalls, self.due = [], False

    def step(self, stalled):
        """Takes a step's stalled fraction; returns whether the step ends with a reset."""
        if self.due:
            self.start_over()
            return True
        self.stalls.append(float(stalled))
        floor, k = self.stalls[0], len(self.stalls)
        share = (np.array(self.stalls) - floor) / max(1 - floor, 1e-30)
        excess = np.maximum(0, (share - self.tolerance) / (1 - self.tolerance)).mean()
        self.due = excess > 2 * self.decay**k / (1 + self.decay**k)
        return False


@pytest.fixture(scope="module", params=[("hard", 0.6), ("soft", 0.6), ("hard", 0.2)], ids=str)
def run(request):
    """A v on e4m3's own grid, nearest, which stalls: ages, measured stalls, the replay's resets."""
    kind, tolerance = request.param
    nearest = qstate.Storage(qstate.E4M3)
    policy = qstate.adaptive(tolerance, kind=kind)
    with pytest.warns(UserWarning, match="second moment"):
        tx = qstate.scale_by_adam(
            b2=DECAY,
            nu_storage=nearest,
            mu_reset=policy if kind == "hard" else None,
            nu_reset=policy,
        )
    rng = np.random.default_rng(0)
    state, step = tx.init({"w": jnp.zeros((64, 128))}), jax.jit(tx.update)
    replay, ages, resets = Replay(DECAY, tolerance), [], []
    for _ in range(STEPS):
        g = {"w": jnp.asarray(16 * rng.normal(size=(64, 128)), jnp.float32)}
        before, (_, state) = state, step(g, state)
        ages.append(int(state.nu.age))
        resets.append(replay.step(qstate.stall_fraction(before, state)["nu"]))
    return np.array(ages), np.array(resets)


def test_the_first_reset_is_the_replays(run):
    ages, resets = run
    assert np.any(resets)
    first = np.argmax(resets)
    assert 10 < first < STEPS - 10
    np.testing.assert_array_equal(ages[: first + 1], [*range(1, first + 1), 0])


def test_every_reset_is_the_replays(run):
    ages, resets = run
    np.testing.assert_array_equal(np.flatnonzero(ages == 0), np.flatnonzero(resets))


def test_an_average_that_does_not_stall_is_not_reset():
    tx = qstate.scale_by_adam(
        b2=DECAY, nu_storage=qstate.storage("fp32")[1], nu_reset=qstate.adaptive(kind="soft")
    )
    rng = np.random.default_rng(0)
    state, step = tx.init({"w": jnp.zeros((64, 128))}), jax.jit(tx.update)
    for _ in range(STEPS):
        _, state = step({"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}, state)
    assert int(state.nu.age) == STEPS


def test_both_moments_reset_when_the_second_is_due():
    tx = qstate.adamw(1e-3, b2=0.9, storage="fp4", reset=qstate.adaptive(0.0))
    rng = np.random.default_rng(0)
    p = {"w": jnp.zeros((64, 128))}
    state, step = tx.init(p), jax.jit(tx.update)
    for _ in range(40):
        _, state = step({"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}, state, p)
        assert int(state[0].mu.age) == int(state[0].nu.age)
    assert int(state[0].nu.age) < 40
    assert state[0].mu.monitor is None


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, 2.0])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        qstate.adaptive(tolerance)
