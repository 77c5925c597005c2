"""Stop, save, restore, go on: the scale, its counter and the skipped steps as without."""

import checkpointing
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

STOP, STEPS, SKIPPED, PERIOD = 8, 16, (6, 11), 3

OPTIMIZERS = {
    "qstate-fp8": lambda: qstate.adamw(
        optax.linear_schedule(1e-2, 1e-3, 10),
        reset=qstate.every(5),
        exempt=lambda path, leaf: False,
    ),
    "optax": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}
SCALES = {
    "dynamic": lambda: jmp.DynamicLossScale(jnp.float32(2.0**10), period=PERIOD),
    "static": lambda: jmp.StaticLossScale(2.0**10),
    "none": jmp.NoOpLossScale,
}


THROUGH = {name: way for name, way in checkpointing.WAYS.items() if name != "PyTreeCheckpointer"}
through = pytest.mark.parametrize("through", THROUGH.values(), ids=THROUGH.keys())


def _parameters():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"bias": draw(130), "kernel": draw(33, 130)}


def _go_on(tx, params, state, first, last):
    """Parameters and state after steps, and the scale of each."""

    @jax.jit
    def step(params, state, gradients):
        scale = qstate.loss_scale(state)
        updates, state = tx.update(scale.scale(gradients), state, params)
        return optax.apply_updates(params, updates), state, scale.loss_scale

    scales = []
    for number in range(first, last):
        rng = np.random.default_rng(100 + number)
        draw = lambda p, rng=rng: p + rng.normal(size=p.shape).astype(np.float32)  # noqa: E731
        gradients = jax.tree.map(draw, _parameters())
        if number in SKIPPED:
            gradients["kernel"] = gradients["kernel"].at[0, 0].set(jnp.inf)
        params, state, scale = step(params, state, gradients)
        scales.append(float(scale))
    return (params, state), scales


def _assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(
    scope="module",
    params=[pytest.param((optimizer, "dynamic"), id=name) for name, optimizer in OPTIMIZERS.items()]
    + [pytest.param((OPTIMIZERS["optax"], kind), id=kind) for kind in ("static", "none")],
)
def uninterrupted(request):
    """A factory, where it stands after 8 steps, and after 16."""
    optimizer, kind = request.param
    make = lambda: qstate.with_loss_scale(optimizer(), SCALES[kind]())  # noqa: E731
    tx, params = make(), _parameters()
    halfway, before = _go_on(tx, params, tx.init(params), 0, STOP)
    end, after = _go_on(tx, *halfway, STOP, STEPS)
    if kind == "dynamic":
        assert np.log2(before).tolist() == [10, 10, 10, 11, 11, 11, 12, 11]
        assert np.log2(after).tolist() == [11, 11, 12, 12, 11, 11, 11, 12]
        assert (int(halfway[1].scaler.counter), int(halfway[1].total_notfinite)) == (1, 1)
    return make, halfway, (end, after)


@through
def test_a_run_that_was_stopped_goes_on_as_it_would_have(uninterrupted, through, tmp_path):
    make, halfway, (end, scales) = uninterrupted
    tx, params = make(), _parameters()  # as another process has it
    restored = through(halfway, (params, tx.init(params)), tmp_path)
    _assert_same_bits(restored, halfway)
    assert restored[1].scaler.settings == halfway[1].scaler.settings
    resumed, after = _go_on(tx, *restored, STOP, STEPS)
    assert after == scales
    _assert_same_bits(resumed, end)


@through
def test_settings_are_those_of_the_new_run(through, tmp_path):
    """The numbers are saved, the period is not: a run may go on with another."""
    params = _parameters()
    saved, other = (
        qstate.with_loss_scale(
            optax.sgd(1e-2), jmp.DynamicLossScale(jnp.float32(scale), period=period)
        )
        for scale, period in [(2.0**10, 3), (2.0**4, 7)]
    )
    (_, state), _ = _go_on(saved, params, saved.init(params), 0, STOP)
    restored = through(state, other.init(params), tmp_path)
    read = qstate.loss_scale(restored)
    assert (float(read.loss_scale), int(read.counter), read.period) == (2.0**11, 1, 7)
    _, scales = _go_on(other, params, restored, STOP, 11)
    assert scales == [2.0**11] * 3


def test_what_flax_writes_is_a_dict_of_numbers():
    tx = qstate.with_loss_scale(optax.sgd(1e-2), SCALES["dynamic"]())
    written = flax.serialization.to_state_dict(tx.init(_parameters()))
    assert written.keys() == {"inner_state", "scaler", "notfinite_count", "total_notfinite"}
    assert {name: float(x) for name, x in written["scaler"].items()} == {
        "value": 2.0**10,
        "counter": 0,
    }
