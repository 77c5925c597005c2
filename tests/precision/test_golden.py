"""The loss scale moves as `torch.amp.GradScaler` moved its own, step by step."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

FILE = pathlib.Path(__file__).parent.parent / "golden" / "grad_scaler.json"
GOLDEN = json.loads(FILE.read_text())["trajectories"]
BAD = {"inf": np.inf, "nan": np.nan}

trajectories = pytest.mark.parametrize("name", GOLDEN)


@functools.cache
def replayed(name):
    """What happened at each step of a trajectory that the file describes."""
    golden = GOLDEN[name]
    config, steps = golden["config"], golden["steps"]
    assert config["backoff_factor"] == 1 / config["growth_factor"]  # jmp has one number for both
    tx = qstate.with_loss_scale(
        optax.sgd(1.0),
        jmp.DynamicLossScale(
            jnp.float32(config["init_scale"]),
            period=config["growth_interval"],
            factor=config["growth_factor"],
        ),
    )
    bad = np.ones(steps, np.float32)
    for at, kind in golden["overflow"]:
        bad[at] = BAD[kind]
    ceiling = np.full(steps, np.inf, np.float32)
    if "ceiling" in golden:
        bad[:] = np.inf  # where it overflows is for our own scale to say
        for at, value in golden["ceiling"]:
            ceiling[at:] = value
    else:
        ceiling[[at for at, _ in golden["overflow"]]] = 0

    def step(carry, x):
        params, state = carry
        bad, ceiling = x
        scale = qstate.loss_scale(state).loss_scale
        # One number of one leaf overflows; the rest is what a loss of slope 1 gives.
        worst = jnp.where(scale > ceiling, bad, scale)
        gradients = {"a": jnp.stack([scale, worst, scale]), "b": scale}
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (scale, params, state._replace(inner_state=()))

    params = {"a": jnp.zeros(3), "b": jnp.float32(0)}
    run = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))
    (_, last), history = run((params, tx.init(params)), (bad, ceiling))
    return last, jax.device_get(history)


def skipped(name):
    flags = np.zeros(GOLDEN[name]["steps"], bool)
    flags[GOLDEN[name]["skipped"]] = True
    return flags


@trajectories
def test_the_scale_of_every_step(name):
    last, (scale, _, _) = replayed(name)
    values, counts = zip(*GOLDEN[name]["scale"], strict=True)
    np.testing.assert_array_equal(scale, np.repeat(values, counts))
    assert float(last.scaler.value) == GOLDEN[name]["final_scale"]


@trajectories
def test_the_growth_tracker_after_every_step(name):
    _, (_, _, state) = replayed(name)
    runs = [np.arange(first, first + length) for first, length in GOLDEN[name]["tracker"]]
    np.testing.assert_array_equal(state.scaler.counter, np.concatenate(runs))


@trajectories
def test_parameters_move_in_just_the_steps_that_are_not_skipped(name):
    _, (_, params, _) = replayed(name)
    taken = np.cumsum(~skipped(name))
    np.testing.assert_array_equal(params["b"], -taken)
    np.testing.assert_array_equal(params["a"], np.stack([-taken] * 3, axis=1))


@trajectories
def test_skipped_steps_are_counted_in_all_and_in_a_row(name):
    _, (_, _, state) = replayed(name)
    np.testing.assert_array_equal(state.total_notfinite, np.cumsum(skipped(name)))
    row, expected = 0, []
    for skip in skipped(name):
        row = row + 1 if skip else 0
        expected.append(row)
    np.testing.assert_array_equal(state.notfinite_count, expected)


def test_an_overflow_in_the_step_that_would_grow():
    """It falls and the tracker starts over: the two orders that a loop could do that in differ."""
    steps = [at for at, _ in GOLDEN["defaults"]["overflow"]]
    _, (scale, _, state) = replayed("defaults")
    late = [at for at in steps if at and state.scaler.counter[at - 1] == 1999]
    assert len(late) == 1
    np.testing.assert_array_equal(scale[late[0] + 1], scale[late[0]] / 2)
