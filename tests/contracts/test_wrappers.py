"""Every transformation inside of what optax wraps around transformations: traced."""

import jax
import jax.numpy as jnp
import optax
import pytest

MASK = {"bias": False, "kernel": True}
LABELS = {"bias": "rest", "kernel": "quantized"}

WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx, optax.scale(0.5)),
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition({"quantized": tx, "rest": optax.sgd(0.1)}, LABELS),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, every_k_schedule=2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step: step % 2 == 0
    ),
    "named_chain": lambda tx: optax.named_chain(("inner", tx), ("after", optax.scale(0.5))),
}


@pytest.fixture(params=WRAPPERS.values(), ids=WRAPPERS.keys())
def wrap(request):
    return request.param


def _keeps_its_state(tx, params, spec):
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert spec(after) == spec(state)
    assert spec(updates) == spec(params)


def test_inside_of_a_wrapper(case, wrap, params, spec):
    _keeps_its_state(wrap(case.make()), params, spec)


def test_inside_of_apply_if_finite_on_bf16_parameters(case, params16, spec):
    _keeps_its_state(WRAPPERS["apply_if_finite"](case.make()), params16, spec)


def test_inside_of_multi_steps_on_bf16_parameters(case, params16, spec):
    state, after = _step(WRAPPERS["MultiSteps"](case.make()), params16)
    assert spec(after) == spec(state)


def test_hyperparameters_injected(case, params, spec):
    tx = _injected(case)
    state = jax.eval_shape(tx.init, params)
    assert state.hyperparams["learning_rate"].dtype == jnp.float32
    _keeps_its_state(tx, params, spec)


def test_hyperparameters_injected_as_schedules(case, params, spec):
    tx = _injected(case, learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    _keeps_its_state(tx, params, spec)


def test_hyperparameters_injected_for_bf16_parameters(case, params16, spec):
    if "schedule_free" in case.name:
        pytest.skip("optax's own state changes its dtype here")
    state, after = _step(_injected(case, hyperparam_dtype=jnp.float32), params16)
    assert spec(after) == spec(state)


def _injected(case, learning_rate=0.1, **settings):
    factory = optax.inject_hyperparams(case.factory, static_args=case.static, **settings)
    return factory(learning_rate=learning_rate, **case.settings)


def _step(tx, params):
    state = jax.eval_shape(tx.init, params)
    return state, jax.eval_shape(tx.update, params, state, params)[1]
