"""Where `qstate.loss_scale` finds a scale, and what it warns of while it reads one."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import qstate

SCALE = 2.0**15
PARAMS = {"b": jnp.ones(16), "w": jnp.ones((4, 8))}
GOOD = jax.tree.map(lambda p: p * SCALE, PARAMS)
BAD = {**GOOD, "w": GOOD["w"].at[3, 7].set(jnp.nan)}


def dynamic(scale=SCALE, **settings):
    return jmp.DynamicLossScale(jnp.float32(scale), **settings)


def guarded(loss_scale=None):
    return qstate.with_loss_scale(optax.adam(1e-3), loss_scale or dynamic())


def accumulated(tx, steps=2):
    return optax.MultiSteps(tx, steps).gradient_transformation()


def warnings_of(read, *args):
    """The texts of what a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(*args)
    return [str(warning.message) for warning in caught]


def read_jitted(state):
    """Reads the scale inside of a step, as a loss does."""
    return jax.jit(lambda state: qstate.loss_scale(state).scale(jnp.float32(1)))(state)


# Where it is found.

PLACES = {
    "alone": guarded,
    "chain": lambda: optax.chain(guarded(), optax.scale(0.5)),
    "masked": lambda: optax.masked(guarded(), {"b": True, "w": False}),
    "partition": lambda: optax.partition(
        {"a": guarded(), "b": optax.sgd(1.0)}, {"b": "b", "w": "a"}
    ),
    "named-chain": lambda: optax.named_chain(("adam", guarded()), ("half", optax.scale(0.5))),
    "multi-steps": lambda: accumulated(guarded()),
    "around-multi-steps": lambda: qstate.with_loss_scale(accumulated(optax.adam(1e-3)), dynamic()),
    "master-weights": lambda: qstate.with_master_weights(guarded()),
    "inject-hyperparams": lambda: optax.inject_hyperparams(
        lambda rate: qstate.with_loss_scale(optax.adam(rate), dynamic())
    )(1e-3),
    "apply-if-finite": lambda: optax.apply_if_finite(guarded(), 3),
    "schedule-free": lambda: optax.contrib.schedule_free(guarded(), 1e-3),
    "quantize_state": lambda: qstate.quantize_state(guarded(), "fp8"),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES.keys())
def test_a_scale_is_found_wherever_it_is(make):
    tx = make()
    state = tx.init(PARAMS)
    _, state = jax.jit(tx.update)(GOOD, state, PARAMS)
    read = qstate.loss_scale(state)
    assert isinstance(read, jmp.DynamicLossScale)
    assert float(read.loss_scale) == float(read_jitted(state)) == SCALE
    assert int(read.counter) in (0, 1)


def test_in_a_train_state():
    model = nn.Dense(3)
    x = jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=guarded())
    state = state.replace(step=jnp.int32(0))

    @jax.jit
    def step(state, bad):
        scale = qstate.loss_scale(state.opt_state)
        loss = lambda p: scale.scale(bad * jnp.sum(state.apply_fn({"params": p}, x)))  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for bad, scale, count in [(1.0, SCALE, 1), (jnp.inf, SCALE / 2, 1), (1.0, SCALE / 2, 2)]:
        state = step(state, bad)
        assert float(qstate.loss_scale(state.opt_state).loss_scale) == scale
        assert int(state.opt_state.inner_state[0].count) == count
    assert step._cache_size() == 1


def _nnx_step(read):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, guarded(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, bad):
        scale = read(optimizer)
        loss = lambda m: scale * bad * jnp.sum(m(jnp.ones((2, 4))))  # noqa: E731
        optimizer.update(model, nnx.grad(loss)(model))

    return model, optimizer, step


def test_in_an_nnx_optimizer_a_bad_step_is_skipped():
    model, optimizer, step = _nnx_step(lambda optimizer: SCALE)
    step(model, optimizer, 1.0)
    before = np.asarray(model.kernel[...])
    step(model, optimizer, jnp.inf)
    np.testing.assert_array_equal(model.kernel[...], before)
    assert float(optimizer.opt_state.scaler.value[...]) == SCALE / 2


def test_in_an_nnx_optimizer_the_scale_is_read():
    model, optimizer, step = _nnx_step(lambda o: qstate.loss_scale(o.opt_state).loss_scale)
    for bad, scale in [(1.0, SCALE), (jnp.inf, SCALE / 2), (1.0, SCALE / 2)]:
        step(model, optimizer, bad)
        assert float(qstate.loss_scale(optimizer.opt_state).loss_scale) == scale
    bad = jax.tree.map(lambda p: p * jnp.inf, nnx.state(model, nnx.Param))
    assert qstate.explain_nonfinite(bad, optimizer.opt_state).cause == "probing"


@pytest.mark.parametrize(
    "state", [(), optax.adam(1e-3).init(PARAMS), None], ids=["()", "adam", "None"]
)
def test_no_scale_is_an_error(state):
    with pytest.raises(ValueError, match=r"holds no loss scale; .*qstate\.with_loss_scale\(tx"):
        qstate.loss_scale(state)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(guarded(), guarded()),
        qstate.with_loss_scale(guarded(), dynamic()),
        optax.partition({"a": guarded(), "b": guarded()}, {"b": "b", "w": "a"}),
    ],
    ids=["chain", "nested", "partition"],
)
def test_two_scales_are_an_error(tx):
    """Gradients would be divided twice."""
    with pytest.raises(ValueError, match="holds 2 loss scales; a loss has one"):
        qstate.loss_scale(tx.init(PARAMS))


# The order of links.

CLIP = optax.clip_by_global_norm(1.0)
WRONG = {
    "clip": (lambda: optax.chain(CLIP, guarded()), 1),
    "two": (lambda: optax.chain(CLIP, optax.zero_nans(), guarded(), optax.scale(1.0)), 2),
    "nested": (lambda: optax.chain(optax.chain(CLIP, guarded()), optax.scale(1.0)), 1),
    "nested-before": (lambda: optax.chain(optax.chain(CLIP, optax.scale(1.0)), guarded()), 1),
    "masked": (
        lambda: optax.masked(optax.chain(CLIP, guarded()), {"b": True, "w": True}),
        1,
    ),
    "multi-steps": (lambda: accumulated(optax.chain(CLIP, guarded())), 1),
    "static": (lambda: optax.chain(CLIP, guarded(jmp.StaticLossScale(8.0))), 1),
    "partition": (
        lambda: optax.partition(
            {"a": optax.chain(CLIP, guarded()), "b": optax.sgd(1.0)}, {"b": "b", "w": "a"}
        ),
        1,
    ),
}


@pytest.mark.parametrize("read", [qstate.loss_scale, read_jitted], ids=["eager", "jit"])
@pytest.mark.parametrize(("make", "links"), WRONG.values(), ids=WRONG.keys())
def test_links_before_the_scale_are_warned_of(make, links, read):
    (text,) = warnings_of(read, make().init(PARAMS))
    assert text.startswith(f"{links} link{'s' * (links > 1)} of the chain")
    assert "still multiplied by the loss scale" in text
    assert "qstate.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), ...)" in text


@pytest.mark.parametrize(
    "tx",
    [
        qstate.with_loss_scale(optax.chain(CLIP, optax.adam(1e-3)), dynamic()),
        optax.chain(guarded(), optax.scale(0.5)),
        optax.chain(CLIP, guarded(jmp.NoOpLossScale())),
        qstate.with_master_weights(guarded()),
        accumulated(guarded()),
        optax.partition({"a": guarded(), "b": CLIP}, {"b": "b", "w": "a"}),
    ],
    ids=["inside", "after", "no-scale", "master-weights", "multi-steps", "partition"],
)
def test_right_orders_are_not(tx):
    state = tx.init(PARAMS)
    assert warnings_of(qstate.loss_scale, state) == []
    assert warnings_of(read_jitted, state) == []


@pytest.mark.parametrize("read", [qstate.loss_scale, read_jitted], ids=["eager", "jit"])
@pytest.mark.parametrize("links", [("a", "b"), ("b", "a")], ids=["sorted", "not"])
def test_a_named_chain_is_a_mapping_whose_order_cannot_be_seen(links, read):
    before, after = links
    tx = optax.named_chain((before, CLIP), (after, guarded()))
    assert warnings_of(read, jax.jit(tx.init)(PARAMS)) == []


def test_a_warning_names_the_line_that_reads():
    state = WRONG["clip"][0]().init(PARAMS)
    with pytest.warns(UserWarning, match="link of the chain") as caught:
        qstate.loss_scale(state)
    assert caught[0].filename == __file__


# A scale at its floor.


def skipped(tx, steps):
    """The state after so many steps that were all skipped."""
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for _ in range(steps):
        _, state = update(BAD, state, PARAMS)
    return state


@pytest.mark.parametrize("smallest", [1.0, 0.25, 8.0])
@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_scale_at_its_floor_is_warned_of_after_5_steps(steps, smallest):
    tx = guarded(dynamic(smallest, min_loss_scale=jnp.float32(smallest)))
    state = skipped(tx, steps)
    texts = warnings_of(qstate.loss_scale, state)
    assert len(texts) == (steps >= 5)
    for text in texts:
        assert text.startswith(f"the last {steps} steps were all skipped")
        assert f"the loss scale is {smallest:g}, as small as it may be" in text
        assert "qstate.explain_nonfinite(grads, opt_state, loss=loss)" in text
        assert "MultiSteps" not in text
    assert warnings_of(read_jitted, state) == []


def test_a_scale_above_its_floor_is_not():
    tx = guarded(dynamic(2.0**6))
    assert warnings_of(qstate.loss_scale, skipped(tx, 5)) == []
    assert float(qstate.loss_scale(skipped(tx, 5)).loss_scale) == 2.0
    (text,) = warnings_of(qstate.loss_scale, skipped(tx, 6))
    assert text.startswith("the last 6 steps")
    tx = guarded(dynamic(2.0**4, min_loss_scale=jnp.float32(0.25)))
    assert warnings_of(qstate.loss_scale, skipped(tx, 5)) == []


def test_a_step_that_is_taken_ends_the_warning():
    tx = guarded(dynamic(1.0))
    _, state = tx.update(PARAMS, skipped(tx, 9), PARAMS)
    assert warnings_of(qstate.loss_scale, state) == []


@pytest.mark.parametrize("loss_scale", [jmp.StaticLossScale(8.0), jmp.NoOpLossScale()], ids=str)
def test_a_scale_that_does_not_move_is_at_its_floor(loss_scale):
    tx = guarded(loss_scale)
    assert warnings_of(qstate.loss_scale, skipped(tx, 4)) == []
    (text,) = warnings_of(qstate.loss_scale, skipped(tx, 5))
    assert f"the loss scale is {float(loss_scale.loss_scale):g}, " in text


@pytest.mark.parametrize("around", [lambda tx: tx, optax.chain], ids=["outermost", "in-a-chain"])
def test_an_accumulator_around_the_scale_is_named(around):
    """Which stays NaN once an infinity was in it."""
    tx = around(accumulated(guarded(dynamic(8.0))))
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for g in [BAD] + [PARAMS] * 17:
        _, state = update(g, state, PARAMS)
    (text,) = warnings_of(qstate.loss_scale, state)
    assert text.startswith("the last 9 steps were all skipped")
    assert "optax.MultiSteps around with_loss_scale" in text
    assert "qstate.with_loss_scale(optax.MultiSteps(tx, k).gradient_transformation()" in text


def test_an_accumulator_inside_is_not():
    tx = qstate.with_loss_scale(accumulated(optax.adam(1e-3)), dynamic(1.0))
    (text,) = warnings_of(qstate.loss_scale, skipped(tx, 5))
    assert "MultiSteps" not in text
