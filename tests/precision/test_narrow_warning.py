"""The warning for 16-bit parameters that nothing carries the rounding of."""

import warnings

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import qstate

TITLE = "parameters in 16 bits"


def _scaled(tx):
    return qstate.with_loss_scale(tx, jmp.DynamicLossScale(jnp.float32(2**10)))


def _rounded(tx):
    return optax.chain(tx, qstate.stochastic_round_params(0))


def _adamw():
    return qstate.adamw(1e-3)


def _steps(tx, params, between=lambda: None):
    """All warnings of ``init`` and of three updates, traced."""
    with warnings.catch_warnings(record=True) as at_init:
        warnings.simplefilter("always")
        state = tx.init(params)
    between()
    with warnings.catch_warnings(record=True) as at_first:
        warnings.simplefilter("always")
        jax.eval_shape(tx.update, params, state, params)
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        for _ in range(2):
            jax.eval_shape(tx.update, params, state, params)
    assert not at_init
    assert not later
    return at_first


@pytest.fixture(params=[jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def params(request):
    return {"a": jnp.ones(5), "layer": {"w": jnp.ones((3, 5), request.param)}}


BARE = {
    "adamw": _adamw,
    "scale_by_adam": qstate.scale_by_adam,
    "quantize_state": lambda: qstate.quantize_state(optax.adam(1e-3), "fp8"),
    "with_loss_scale-optax": lambda: _scaled(optax.adamw(1e-3)),
    "with_loss_scale-qstate": lambda: _scaled(_adamw()),
    "with_loss_scale-quantize_state": lambda: _scaled(
        qstate.quantize_state(optax.adam(1e-3), "fp8")
    ),
    "guard": lambda: qstate.with_loss_scale(_adamw(), jmp.NoOpLossScale()),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), _adamw()),
    "MultiSteps": lambda: optax.MultiSteps(_adamw(), 2),
    "rounding-comes-first": lambda: optax.chain(qstate.stochastic_round_params(0), _adamw()),
    "inject_hyperparams": pytest.param(
        lambda: optax.inject_hyperparams(qstate.adamw, hyperparam_dtype=jnp.float32)(
            learning_rate=1e-3
        ),
        marks=pytest.mark.xfail(strict=True, reason="optax makes a new optimizer in every update"),
    ),
}


def _cases(table):
    parts = {k: v if hasattr(v, "marks") else pytest.param(v) for k, v in table.items()}
    return [pytest.param(*v.values, id=k, marks=v.marks) for k, v in parts.items()]


@pytest.mark.parametrize("make", _cases(BARE))
def test_it_comes_once_at_the_first_update(make, params):
    (warning,) = _steps(make(), params)
    message = str(warning.message)
    dtype = params["layer"]["w"].dtype
    assert message.startswith(f"{TITLE}: 'layer/w' is {dtype}")
    # An update of less than half of the last bit, 2^-mantissa-1, changes nothing.
    assert ("2^-8" if dtype == jnp.bfloat16 else "2^-11") in message
    assert "qstate.with_master_weights(tx)" in message
    assert "qstate.stochastic_round_params(key)" in message


CARRIED = {
    "with_master_weights": lambda: qstate.with_master_weights(_adamw()),
    "remainder": lambda: qstate.with_master_weights(_adamw(), 8),
    "with_master_weights-quantize_state": lambda: qstate.with_master_weights(
        qstate.quantize_state(optax.adam(1e-3), "fp8")
    ),
    "with_master_weights-chain": lambda: qstate.with_master_weights(
        optax.chain(optax.clip_by_global_norm(1.0), _adamw())
    ),
    "chain-with_master_weights": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), qstate.with_master_weights(_adamw())
    ),
    "with_loss_scale-with_master_weights": lambda: _scaled(qstate.with_master_weights(_adamw())),
    "with_master_weights-with_loss_scale": lambda: qstate.with_master_weights(_scaled(_adamw())),
    "with_loss_scale-with_master_weights-optax": lambda: _scaled(
        qstate.with_master_weights(optax.adamw(1e-3))
    ),
    "with_loss_scale-chain-with_master_weights": lambda: _scaled(
        optax.chain(optax.clip_by_global_norm(1.0), qstate.with_master_weights(_adamw()))
    ),
    "MultiSteps-with_master_weights": lambda: optax.MultiSteps(
        qstate.with_master_weights(_adamw()), 2
    ),
    "rounded": lambda: _rounded(_adamw()),
    "rounded-quantize_state": lambda: _rounded(qstate.quantize_state(optax.adam(1e-3), "fp8")),
    "with_loss_scale-rounded": lambda: _scaled(_rounded(_adamw())),
    "rounded-with_loss_scale": lambda: _rounded(_scaled(_adamw())),
    "with_loss_scale-rounded-optax": lambda: _scaled(_rounded(optax.adamw(1e-3))),
    "rounded-with_loss_scale-optax": lambda: _rounded(_scaled(optax.adamw(1e-3))),
    "MultiSteps-rounded": lambda: optax.MultiSteps(_rounded(_adamw()), 2),
}


@pytest.mark.parametrize("make", CARRIED.values(), ids=CARRIED.keys())
def test_it_does_not_come_where_something_carries_the_rounding(make, params):
    assert not _steps(make(), params)


@pytest.mark.parametrize("make", [m for m in BARE.values() if not hasattr(m, "marks")][:6])
def test_it_does_not_come_for_float32_parameters(make):
    assert not _steps(make(), {"w": jnp.ones((3, 5)), "i": jnp.arange(2)})


def test_a_later_init_with_float32_parameters_takes_it_back(params):
    tx = _adamw()
    tx.init(params)
    wide = {"w": jnp.ones(3)}
    assert not _steps(tx, wide)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_it_comes_where_steps_are_taken(run, params):
    for tx, count in ((_scaled(_adamw()), 1), (_rounded(_scaled(_adamw())), 0)):
        state = tx.init(params)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update = run(tx.update)
            for _ in range(2):
                _, state = update(params, state, params)
        assert len(caught) == count


def test_every_transformation_has_its_own(params):
    first, second = _adamw(), _adamw()
    second.init(params)
    assert len(_steps(first, params)) == 1
    assert len(_steps(second, params)) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            lambda: qstate.stochastic_round_params(0).init(jnp.ones(3, jnp.bfloat16)),
            id="stochastic_round_params",
            marks=pytest.mark.xfail(strict=True, reason="it calls off all that wait"),
        ),
        pytest.param(lambda: _scaled(optax.sgd(1.0)).init(jnp.ones(3)), id="with_loss_scale"),
    ],
)
def test_another_optimizer_does_not_call_it_off(other, params):
    assert len(_steps(_adamw(), params, between=other)) == 1


@pytest.mark.parametrize(
    ("make", "run"),
    [
        pytest.param(BARE["quantize_state"], lambda f: f, id="quantize_state"),
        pytest.param(_adamw, lambda f: f, id="chain"),
        pytest.param(BARE["quantize_state"], jax.jit, id="jitted"),
    ],
)
def test_it_names_the_line_of_the_update(make, run):
    tx, params = make(), {"w": jnp.ones((3, 5), jnp.bfloat16)}
    state, update = tx.init(params), run(tx.update)
    with pytest.warns(UserWarning, match=TITLE) as caught:
        update(params, state, params)
    assert caught[0].filename == __file__
