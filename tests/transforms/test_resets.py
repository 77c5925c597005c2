"""Resets inside of a step: what is zero after one, what is not, and what the next step does."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate
from qstate.optimizers import resets

NAMES = ("fp32", "bf16", "fp8", "fp4", "int8", "int4")
STORAGES = [
    pytest.param(name, marks=[] if name in ("fp32", "fp8", "int4") else [pytest.mark.slow])
    for name in NAMES
]


def _scale_by_adam(storage="fp32", **settings):
    mu, nu = qstate.storage(storage)
    return qstate.scale_by_adam(mu_storage=mu, nu_storage=nu, **settings)


def _gradients(steps, shapes=((64, 128), (7,)), seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield {str(i): jnp.asarray(rng.normal(size=s), jnp.float32) for i, s in enumerate(shapes)}


def _states(tx, steps):
    """The states before the first step and after each, and the updates."""
    first = next(_gradients(1))
    state, step = tx.init(first), jax.jit(tx.update)
    states, history = [state], []
    for g in _gradients(steps):
        updates, state = step(g, state)
        states.append(state)
        history.append(updates)
    return states, history


@functools.cache
def _both_hard(storage, period=4, steps=9):
    policy = qstate.every(period)
    return _states(_scale_by_adam(storage, mu_reset=policy, nu_reset=policy), steps)


@functools.cache
def _no_reset(storage, steps=4):
    return _states(_scale_by_adam(storage), steps)


def _zero(average):
    arrays = jax.tree.leaves((average.codes, average.scales, average.age, average.mass))
    return all(not np.any(np.asarray(a, np.float32)) for a in arrays)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_hard_reset_of_both_zeroes_both_exactly_at_the_period(storage):
    for step, state in enumerate(_both_hard(storage)[0]):
        assert _zero(state.mu) == _zero(state.nu) == (step % 4 == 0)
        assert int(state.mu.age) == int(state.nu.age) == step % 4
        assert int(state.count) == step


@pytest.mark.parametrize("storage", STORAGES)
def test_a_hard_reset_of_one_leaves_the_other_untouched(storage):
    states, _ = _states(_scale_by_adam(storage, mu_reset=qstate.every(4)), 4)
    without, _ = _no_reset(storage)
    assert _zero(states[4].mu)
    assert not _zero(without[4].mu)
    for a, b in zip(jax.tree.leaves(states[4].nu), jax.tree.leaves(without[4].nu), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(states[4].key, without[4].key)


def test_periods_may_differ():
    tx = _scale_by_adam("fp8", mu_reset=qstate.every(2), nu_reset=qstate.every(6))
    states, _ = _states(tx, 12)
    assert [int(s.mu.age) for s in states] == [n % 2 for n in range(13)]
    assert [int(s.nu.age) for s in states] == [n % 6 for n in range(13)]


@pytest.mark.parametrize("storage", STORAGES)
def test_the_step_after_a_hard_reset_of_both_is_a_sign_step(storage):
    for update in jax.tree.leaves(_both_hard(storage)[1][4]):
        np.testing.assert_allclose(np.abs(update), 1, rtol=1e-4)


@pytest.mark.parametrize("storage", STORAGES)
def test_bias_correction_follows_the_age_of_each_average(storage):
    # Resetting v alone under the step count would make this step 31.6 times as long.
    with pytest.warns(UserWarning, match="soft"):
        tx = _scale_by_adam(storage, nu_reset=qstate.every(50))
    g = {"w": jnp.full((64, 128), 0.25)}
    state, step = tx.init(g), jax.jit(tx.update)
    for _ in range(51):
        updates, state = step(g, state)
    assert (int(state.mu.age), int(state.nu.age)) == (51, 1)
    np.testing.assert_allclose(np.mean(updates["w"]), 1, rtol=0.02)
    np.testing.assert_allclose(updates["w"], 1, rtol=0.2)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_soft_reset_leaves_the_corrected_average_as_it_was(storage):
    period, b2 = 4, 0.999
    soft = _scale_by_adam(storage, nu_reset=qstate.every(period, kind="soft"))
    states, _ = _states(soft, period)
    without, _ = _no_reset(storage)
    reset, kept = states[-1].nu, without[-1].nu
    assert (int(reset.age), int(kept.age)) == (0, period)
    np.testing.assert_allclose(reset.mass, (1 - b2**period) / 32, rtol=1e-4)
    v = qstate.dequantize(states[-1]).nu
    expected = qstate.dequantize(without[-1]).nu
    for name in v:
        if storage == "fp4":  # sqrt(1/32) is rounded
            np.testing.assert_allclose(v[name] * 32, expected[name], rtol=1e-6)
        else:
            np.testing.assert_array_equal(v[name] * 32, expected[name])
    for a, b in zip(jax.tree.leaves(states[-1].mu), jax.tree.leaves(without[-1].mu), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "storage", ["fp8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fp32", "fp4"))]
)
def test_a_soft_reset_makes_no_bump(storage):
    # At rest 1 - b2 of the weight is 2^-5 of the mass afterwards: so the next step hardly moves.
    steps = 1500
    policies = {"soft": qstate.every(steps, kind="soft"), "none": None}
    g = {"w": jax.random.normal(jax.random.key(1), (64, 64))}
    last = {}
    for name, policy in policies.items():
        tx = _scale_by_adam(storage, nu_reset=policy)

        def body(i, state, tx=tx):
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (64, 64))
            return tx.update({"w": noise}, state)[1]

        state = jax.jit(lambda s, body=body: jax.lax.fori_loop(0, steps, body, s))(tx.init(g))
        assert int(state.nu.age) == (0 if policy else steps)
        last[name] = tx.update(g, state)[0]["w"]
    change = jnp.sqrt(jnp.mean((last["soft"] - last["none"]) ** 2) / jnp.mean(last["none"] ** 2))
    assert 0 < change < 0.05


def test_the_mass_after_a_soft_reset_decays_as_the_average_does():
    b2, period = 0.9, 4
    tx = _scale_by_adam(b2=b2, nu_reset=qstate.every(period, kind="soft"))
    states, history = _states(tx, 11)
    v, mass, m = 0.0, 0.0, 0.0
    for step, g in enumerate(_gradients(11), start=1):
        square = np.asarray(g["0"], np.float64) ** 2
        v, mass = b2 * v + (1 - b2) * square, b2 * mass + 1 - b2
        m = 0.9 * m + 0.1 * np.asarray(g["0"], np.float64)
        expected = m / (1 - 0.9**step) / (np.sqrt(v / mass) + 1e-8)
        np.testing.assert_allclose(history[step - 1]["0"], expected, rtol=2e-5, atol=1e-6)
        if step % period == 0:
            v, mass = v / 32, mass / 32
            np.testing.assert_allclose(states[step].nu.mass, mass, rtol=1e-5)


@pytest.mark.parametrize("inner", ["adamw", "quantize_state"])
def test_skipped_steps_do_not_count(inner):
    policy = qstate.every(5)
    tx = optax.apply_if_finite(
        qstate.adamw(1e-3, reset=policy)
        if inner == "adamw"
        else qstate.quantize_state(optax.adam(1e-3), "fp8", reset=policy),
        max_consecutive_errors=100,
    )
    good = {"w": jnp.ones((64, 128))}
    bad = {"w": jnp.ones((64, 128)).at[3, 3].set(jnp.inf)}
    state, step = tx.init(good), jax.jit(tx.update)
    for g in [good] * 3 + [bad] * 10 + [good]:
        _, state = step(g, state, good)
    assert _ages(state) == [4, 4]
    _, state = step(good, state, good)
    assert _ages(state) == [0, 0]


def _ages(state):
    leaves = jax.tree.leaves_with_path(state)
    return [int(leaf) for path, leaf in leaves if getattr(path[-1], "name", "") == "age"]


# The words.


def _ages_of_first_reset(tx, steps):
    g = {"w": jnp.ones((64, 128))}

    def body(state, _):
        state = tx.update(g, state, g)[1]
        return state, (state[0].mu.age, state[0].nu.age)

    _, ages = jax.jit(lambda s: jax.lax.scan(body, s, None, length=steps))(tx.init(g))
    return tuple(np.flatnonzero(np.asarray(a) == 0)[:1] + 1 for a in ages)


@pytest.mark.parametrize(
    ("storage", "period"), [("bf16", 1000), ("fp8", 300), ("fp4", 200)], ids=str
)
def test_the_papers_periods(storage, period):
    assert resets("paper", storage) == (qstate.every(period), qstate.every(period))


@pytest.mark.parametrize(("word", "period"), [("paper", 200), ("theory", 224)])
def test_a_word_resets_both_moments(word, period):
    tx = qstate.adamw(1e-3, storage="fp4", reset=word)
    mu, nu = _ages_of_first_reset(tx, period + 1)
    assert list(mu) == list(nu) == [period]


def test_theory_as_a_soft_policy_resets_the_second_moment_alone():
    tx = qstate.adamw(1e-3, storage="fp4", reset=qstate.theory(kind="soft"))
    mu, nu = _ages_of_first_reset(tx, 225)
    assert (list(mu), list(nu)) == ([], [224])


def test_theory_follows_the_decay_and_the_tolerance():
    period = qstate.theory.reset_period(qstate.E4M3, 0.9, 0.4)
    tx = qstate.adamw(1e-3, b2=0.9, reset=qstate.theory(0.4))
    assert list(_ages_of_first_reset(tx, period + 1)[1]) == [period]


def test_theory_needs_a_decay_that_is_not_traced():
    tx = optax.inject_hyperparams(qstate.adamw)
    with pytest.raises(TypeError, match=r"Python float.*qstate.every"):
        tx(1e-3, reset="theory").init({"w": jnp.ones((64, 128))})


@pytest.mark.parametrize("reset", [None, "recipe"])
@pytest.mark.parametrize("storage", NAMES)
def test_the_recipes_reset_nothing(storage, reset):
    assert resets(reset, storage) == (None, None)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_one_policy_is_for_both_moments_if_hard_and_for_the_second_if_soft(kind):
    policies = (qstate.every(3, kind=kind), qstate.adaptive(kind=kind), qstate.theory(kind=kind))
    for policy in policies:
        assert resets(policy, "fp8") == (policy if kind == "hard" else None, policy)
    pair = (qstate.every(2), None)
    assert resets(pair, "fp8") == pair


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param({"reset": "never"}, ValueError, '"paper", "theory"', id="word"),
        pytest.param({"reset": 300}, ValueError, r"qstate.every\(300\)", id="number"),
        pytest.param(
            {"reset": "paper", "storage": "int8"}, ValueError, "bf16, fp8, fp4", id="int8"
        ),
        pytest.param({"reset": (None, 300)}, TypeError, r"qstate.every\(300\)", id="pair"),
    ],
)
def test_bad_resets_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        qstate.adamw(1e-3, **settings)


# The warnings.


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param((None, qstate.every(300)), id="alone"),
        pytest.param((qstate.every(200), qstate.every(300)), id="unaligned"),
        pytest.param((qstate.every(300, kind="soft"), qstate.every(300)), id="soft-first"),
        pytest.param((None, qstate.theory()), id="theory"),
        pytest.param((None, qstate.adaptive()), id="adaptive"),
    ],
)
def test_a_hard_reset_of_the_second_moment_alone_warns(policies):
    with pytest.warns(UserWarning, match='kind="soft"') as caught:
        qstate.adamw(1e-3, reset=policies)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param((qstate.every(300), qstate.every(300)), id="together"),
        pytest.param((qstate.every(100), qstate.every(300)), id="aligned"),
        pytest.param((None, qstate.every(300, kind="soft")), id="soft"),
        pytest.param((qstate.every(300), None), id="first-alone"),
        pytest.param("paper", id="paper"),
        pytest.param("theory", id="theory"),
        pytest.param(qstate.adaptive(), id="adaptive"),
        pytest.param(qstate.adaptive(kind="soft"), id="adaptive-soft"),
    ],
)
def test_resets_that_are_sound_do_not_warn(policies):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qstate.adamw(1e-3, reset=policies)


def test_a_warning_inside_of_inject_hyperparams():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tx = optax.inject_hyperparams(qstate.scale_by_adam)(nu_reset=qstate.every(3))
        g = {"w": jnp.ones((64, 128))}
        state = tx.init(g)
        jax.jit(tx.update)(g, state)
    assert "stacklevel" not in state.hyperparams


@pytest.mark.parametrize("factory", [qstate.scale_by_adam, qstate.adam, qstate.adamw])
def test_nearest_rounding_of_a_second_moment_warns_once(factory):
    nearest = qstate.Storage(qstate.E4M3, qstate.Block(128))
    arguments, options = (1e-3,), {"storage": (nearest, nearest)}
    if factory is qstate.scale_by_adam:
        arguments, options = (), {"nu_storage": nearest}
    with pytest.warns(UserWarning, match='rounding="stochastic"') as caught:
        factory(*arguments, **options)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("storage", NAMES)
def test_the_recipes_do_not_warn(storage):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qstate.adamw(1e-3, storage=storage)


def test_nearest_rounding_on_a_grid_that_is_fine_enough_does_not_warn():
    nearest = qstate.Storage(qstate.BF16)
    assert qstate.theory.precision_ratio(qstate.BF16, 0.99) < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qstate.scale_by_adam(b2=0.99, nu_storage=nearest)
