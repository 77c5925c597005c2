"""Which fields of an inner state are stored, how, and what a reset resets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate

CONTRIB = optax.contrib


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}


@pytest.fixture(scope="module")
def gradients(params):
    rng = np.random.default_rng(1)
    return [{"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)} for _ in range(6)]


def _stored(inner, params, storage="fp8"):
    """Field names of the averages in the state, those without zero marked."""
    rows = qstate.describe(qstate.quantize_state(inner, storage).init(params))
    held = [row for row in rows if row.storage.startswith(("e4m3", "e5m2"))]
    marks = {row.path.split("/")[-2]: "without zero" in row.storage for row in held}
    return {name for name, square in marks.items() if not square}, {
        name for name, square in marks.items() if square
    }


@pytest.mark.parametrize(
    ("inner", "first", "second"),
    [
        pytest.param(optax.scale_by_adam(), {"mu"}, {"nu"}, id="adam"),
        pytest.param(optax.amsgrad(1e-3), {"mu"}, {"nu", "nu_max"}, id="amsgrad"),
        pytest.param(optax.lion(1e-3), {"mu"}, set(), id="lion"),
        pytest.param(optax.sgd(1e-3, momentum=0.9), {"trace"}, set(), id="sgd"),
        pytest.param(optax.sgd(1e-3), set(), set(), id="sgd-without-momentum"),
        pytest.param(optax.rmsprop(1e-3, centered=True), {"mu"}, {"nu"}, id="rmsprop"),
        pytest.param(optax.adagrad(1e-3), set(), {"sum_of_squares"}, id="adagrad"),
        pytest.param(optax.adadelta(1e-3), set(), {"e_g", "e_x"}, id="adadelta"),
        pytest.param(optax.adan(1e-3), {"m", "v", "g"}, {"n"}, id="adan"),
        pytest.param(CONTRIB.muon(1e-3), {"mu"}, set(), id="muon"),
        pytest.param(CONTRIB.ademamix(1e-3), {"m1", "m2"}, {"nu"}, id="ademamix"),
        pytest.param(CONTRIB.schedule_free_adamw(1e-3), set(), {"nu"}, id="schedule_free"),
        pytest.param(optax.ema(0.9), {"ema"}, set(), id="ema"),
    ],
)
def test_the_fields_that_are_averages_are_stored(inner, first, second, params):
    assert _stored(inner, params) == (first, second)


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        pytest.param(CONTRIB.prodigy(), "params0", id="prodigy"),
        pytest.param(CONTRIB.mechanize(optax.adam(1.0)), "x0", id="mechanize"),
        pytest.param(CONTRIB.dog(), "init_params", id="dog"),
        pytest.param(CONTRIB.dowg(), "init_params", id="dowg"),
        pytest.param(CONTRIB.cocob(), "init_particles", id="cocob"),
    ],
)
def test_fields_that_hold_parameters_are_left_alone(inner, name, params):
    first, second = _stored(inner, params)
    assert name not in first | second


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        pytest.param(CONTRIB.prodigy(), "exp_avg_sq", id="prodigy"),
        pytest.param(CONTRIB.dadapt_adamw(), "exp_avg_sq", id="dadapt_adamw"),
        pytest.param(CONTRIB.momo_adam(), "exp_avg_sq", id="momo_adam"),
    ],
)
def test_second_moments_by_other_names_are_stored_without_zero(inner, name, params):
    assert name in _stored(inner, params)[1]


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        pytest.param(optax.rprop(1e-3), "step_sizes", id="rprop"),  # one that is 0 stays 0
        pytest.param(optax.scale_by_lbfgs(), "params", id="lbfgs"),
        pytest.param(
            optax.adafactor(1e-3),
            "v",
            id="adafactor",
            marks=pytest.mark.xfail(strict=True, reason="adan's v, of the same name, is signed"),
        ),
    ],
)
def test_fields_that_cannot_take_a_zero_are_not_stored_with_one(inner, name, params):
    assert name not in _stored(inner, params)[0]


def test_schedule_frees_weights_are_kept_as_they_are(params):
    tx = qstate.quantize_state(CONTRIB.schedule_free_adamw(1e-2), "fp4")
    state = tx.init(params)
    np.testing.assert_array_equal(state.inner_state.z["w"], params["w"])
    evaluated = CONTRIB.schedule_free_eval_params(state.inner_state, params)
    np.testing.assert_allclose(evaluated["w"], params["w"], rtol=1e-6)


def test_a_mapping_stores_what_it_names(params):
    e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128))
    inner = CONTRIB.schedule_free_adamw(1e-3)
    assert _stored(inner, params, {"nu": e4m3}) == (set(), {"nu"})
    assert _stored(inner, params, {"z": e4m3}) == ({"z"}, set())
    assert _stored(optax.adam(1e-3), params, {"mu": e4m3}) == ({"mu"}, set())


def test_one_storage_holds_every_average(params):
    e5m2 = qstate.Storage(qstate.E5M2, qstate.Block(64))
    assert _stored(optax.adam(1e-3), params, e5m2) == ({"mu"}, {"nu"})


def test_an_average_of_an_initial_value_starts_there(params):
    state = qstate.quantize_state(optax.yogi(1e-3), "fp8").init(params)
    nu = qstate.dequantize(state).inner_state[0].nu["w"]
    np.testing.assert_allclose(nu, 1e-6, rtol=1e-3)


def test_an_integer_leaf_does_not_stop_its_neighbours_from_being_stored(params):
    tx = qstate.quantize_state(optax.sgd(1e-3, momentum=0.9), "fp8")
    state = tx.init(params | {"ids": jnp.arange(5)})
    assert qstate.nbytes(state) < 2 * params["w"].size


@pytest.mark.parametrize(
    ("storage", "reset", "error", "message"),
    [
        pytest.param("fp6", None, ValueError, "fp8", id="unknown-recipe"),
        pytest.param(qstate.E4M3, None, TypeError, "mapping from field names", id="format"),
        pytest.param({"mu": "fp8"}, None, TypeError, "mapping from field names", id="names"),
        pytest.param("fp8", "paper", TypeError, r"qstate.every\(period\)", id="word"),
        pytest.param("fp8", qstate.theory(), TypeError, "reset_period", id="theory"),
        pytest.param("fp8", qstate.adaptive(), TypeError, "decay rates", id="adaptive"),
        pytest.param("fp8", qstate.every(3, kind="soft"), TypeError, "soft", id="soft"),
        pytest.param("fp8", 300, TypeError, r"qstate.every\(period\)", id="number"),
    ],
)
def test_bad_settings_are_refused_early(storage, reset, error, message):
    with pytest.raises(error, match=message):
        qstate.quantize_state(optax.adam(1e-3), storage, reset=reset)


def test_a_name_that_no_field_has_is_refused(params):
    e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128))
    tx = qstate.quantize_state(optax.adam(1e-3), {"mu": e4m3, "momentum": e4m3})
    with pytest.raises(ValueError, match=r"named momentum; found: mu"):
        tx.init(params)


@pytest.mark.parametrize("name", ["mu", "trace"])
def test_an_unsigned_format_for_values_of_both_signs_is_refused(name, params):
    unsigned = qstate.Storage(qstate.UE4M4, qstate.Block(128))
    inner = optax.adam(1e-3) if name == "mu" else optax.sgd(1e-3, momentum=0.9)
    with pytest.raises(ValueError, match=f"{name}.*both signs"):
        qstate.quantize_state(inner, {name: unsigned}).init(params)
    with pytest.raises(ValueError, match=f"{name}.*both signs"):
        qstate.quantize_state(inner, unsigned).init(params)


# Resets.

RESTARTED = {
    "adam": lambda: optax.adam(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "adabelief": lambda: optax.adabelief(1e-3),
    "nadam": lambda: optax.nadam(1e-3),
    "adan": lambda: optax.adan(1e-3),
    "adamax": lambda: optax.adamax(1e-3),
    "sgd": lambda: optax.sgd(1e-3, momentum=0.9),
    "ademamix": lambda: CONTRIB.ademamix(1e-3),
    "adopt": lambda: CONTRIB.adopt(1e-3),
    "partition": lambda: CONTRIB.muon(1e-3),
}


@pytest.mark.parametrize("inner", RESTARTED.values(), ids=RESTARTED.keys())
def test_a_reset_starts_averages_and_their_counts_over(inner, params, gradients):
    tx = qstate.quantize_state(inner(), "fp8", reset=qstate.every(3))
    params = params | {"b": jnp.ones(5)}
    start = tx.init(params)
    state, step = start, jax.jit(tx.update)
    for n, g in enumerate(gradients, start=1):
        _, state = step(g | {"b": jnp.ones(5)}, state, params)
        same = jax.tree.map(np.array_equal, state.inner_state, start.inner_state)
        assert all(jax.tree.leaves(same)) == (n % 3 == 0)


def test_a_reset_leaves_the_counts_of_schedules_alone(params, gradients):
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    tx = qstate.quantize_state(optax.adamw(schedule), "fp8", reset=qstate.every(3))
    state = tx.init(params)
    for g in gradients[:4]:
        _, state = tx.update(g, state, params)
    adam, _, rate = state.inner_state
    assert (int(adam.count), int(adam.mu.age), int(rate.count)) == (1, 1, 4)


def test_the_step_after_a_reset_is_the_first_step_again(params, gradients):
    tx = qstate.quantize_state(optax.adam(1.0), "fp4", reset=qstate.every(2))
    state, step = tx.init(params), jax.jit(tx.update)
    for g in gradients[:3]:
        updates, state = step(g, state, params)
    np.testing.assert_allclose(np.abs(updates["w"]), 1, rtol=1e-3)
