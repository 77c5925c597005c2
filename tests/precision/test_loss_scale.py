"""The scale itself: where it stays, what it is made of, and what is refused."""

import logging

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate
from qstate.precision import LossScaleState

PARAMS = {"w": jnp.ones((2, 3))}
GOOD = {"w": jnp.full((2, 3), 8.0)}
BAD = {"w": jnp.full((2, 3), 8.0).at[1, 2].set(jnp.inf)}


def scales_after(loss_scale, gradients, **settings):
    """The scale after each step, and the last state."""
    tx = qstate.with_loss_scale(optax.sgd(1.0), loss_scale, **settings)

    def step(state, gradients):
        _, state = tx.update(gradients, state, PARAMS)
        return state, state.scaler.value

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    state, scales = jax.jit(lambda s, g: jax.lax.scan(step, s, g))(tx.init(PARAMS), stacked)
    return scales.tolist(), state


def dynamic(scale=2.0**15, **settings):
    return jmp.DynamicLossScale(jnp.float32(scale), **settings)


# Bounds.


@pytest.mark.parametrize("smallest", [1.0, 0.25, 48.0])
def test_always_infinite_gradients_end_at_the_smallest_scale(smallest):
    scales, state = scales_after(dynamic(64.0, min_loss_scale=jnp.float32(smallest)), [BAD] * 12)
    assert scales == [max(64.0 / 2**n, smallest) for n in range(1, 13)]
    assert int(state.notfinite_count) == int(state.total_notfinite) == 12
    read = qstate.loss_scale(state._replace(notfinite_count=jnp.int32(0)))
    assert float(read.min_loss_scale) == smallest


def test_a_smallest_scale_survives_jit_and_jmp():
    """jmp's own does not: it is no part of its pytree."""
    tx = qstate.with_loss_scale(optax.sgd(1.0), dynamic(0.5, min_loss_scale=jnp.float32(0.25)))

    @jax.jit
    def step(state):
        read = qstate.loss_scale(state)
        fallen = read.adjust(jnp.array(False)).adjust(jnp.array(False))
        return tx.update(BAD, state)[1], (read.min_loss_scale, fallen.loss_scale)

    state = jax.jit(tx.init)(PARAMS)
    for expected in (0.25, 0.25, 0.25):
        state, (smallest, fallen) = step(state)
        assert float(smallest) == float(fallen) == 0.25
        assert float(state.scaler.value) == expected
    carried = jax.jit(lambda s: s)(state)
    again = qstate.with_loss_scale(optax.sgd(1.0), qstate.loss_scale(carried))
    assert float(again.update(BAD, again.init(PARAMS))[1].scaler.value) == 0.25


@pytest.mark.parametrize(
    ("first", "largest", "last"),
    [
        (2.0**15, None, 2.0**85),
        (2.0**100, None, 2.0**126),
        (2.0**15, 2.0**20, 2.0**20),
        (512.0, 1000.0, 512.0),
    ],
)
def test_70_growths_end_at_the_largest_scale(first, largest, last):
    settings = {} if largest is None else {"max_loss_scale": largest}
    scales, state = scales_after(dynamic(first, period=1), [GOOD] * 70, **settings)
    assert scales == [min(first * 2.0**n, last) for n in range(1, 71)]
    assert int(state.total_notfinite) == 0
    assert int(state.scaler.counter) == 0


def test_gradients_are_divided_by_the_largest_scale():
    tx = qstate.with_loss_scale(optax.identity(), dynamic(2.0**126))
    updates, _ = jax.jit(tx.update)(jnp.float32([2.0**126, 2.0**120]), tx.init(jnp.zeros(2)))
    np.testing.assert_array_equal(updates, [1.0, 2.0**-6])


# jmp's three.


def test_a_dynamic_scale_has_jmps_numbers():
    loss_scale = dynamic(81.0, period=3, factor=3, counter=jnp.int32(2))
    pattern = [GOOD, BAD, BAD, GOOD, GOOD, GOOD, GOOD, BAD]
    scales, state = scales_after(loss_scale, pattern)
    assert scales == [243.0, 81.0, 27.0, 27.0, 27.0, 81.0, 81.0, 27.0]
    read = qstate.loss_scale(state)
    assert isinstance(read, jmp.DynamicLossScale)
    assert (read.period, read.factor, int(read.counter)) == (3, 3, 0)


@pytest.mark.parametrize("scale", [8.0, 8, np.float16(8), jnp.float16(8), jnp.bfloat16(8)])
def test_a_scale_of_any_dtype_is_held_in_float32(scale):
    for make in (jmp.StaticLossScale, lambda s: jmp.DynamicLossScale(jnp.asarray(s, jnp.float16))):
        tx = qstate.with_loss_scale(optax.identity(), make(scale))
        state = tx.init(PARAMS)
        updates, after = jax.jit(tx.update)(GOOD, state)
        np.testing.assert_array_equal(updates["w"], 1.0)
        for s in (state, after):
            assert (s.scaler.value.dtype, s.scaler.value.shape) == (jnp.float32, ())
            assert qstate.loss_scale(s).loss_scale.dtype == jnp.float32


def test_a_float16_scale_grows_beyond_float16():
    loss_scale = jmp.DynamicLossScale(jnp.float16(2.0**15), period=1)
    scales, _ = scales_after(loss_scale, [GOOD] * 4)
    assert scales == [2.0**16, 2.0**17, 2.0**18, 2.0**19]


def test_a_static_scale_does_not_move():
    scales, state = scales_after(jmp.StaticLossScale(jnp.float32(8.0)), [GOOD, BAD, BAD, GOOD] * 3)
    assert scales == [8.0] * 12
    assert (int(state.total_notfinite), int(state.notfinite_count)) == (6, 0)
    read = qstate.loss_scale(state)
    assert isinstance(read, jmp.StaticLossScale)
    assert float(read.scale(jnp.float32(3.0))) == 24.0


def test_no_scale_is_a_plain_guard():
    tx = qstate.with_loss_scale(optax.trace(0.5), jmp.NoOpLossScale())
    state = tx.init(PARAMS)
    for gradients, expected in [(GOOD, 8.0), (BAD, -0.0), (GOOD, 12.0)]:
        updates, state = jax.jit(tx.update)(gradients, state)
        np.testing.assert_array_equal(updates["w"], expected)
    assert (int(state.total_notfinite), int(state.notfinite_count)) == (1, 0)
    read = qstate.loss_scale(state)
    assert isinstance(read, jmp.NoOpLossScale)
    assert read.scale(3.0) == 3.0


# Structure.


class _Counted:
    """An inner transformation that counts how often it is traced."""

    def __init__(self, inner):
        self.traces = 0
        self.tx = optax.GradientTransformationExtraArgs(inner.init, self._update(inner))

    def _update(self, inner):
        def update(*args, **kwargs):
            self.traces += 1
            return inner.update(*args, **kwargs)

        return update


@pytest.mark.parametrize(
    "loss_scale",
    [dynamic(64.0, period=2), jmp.StaticLossScale(8.0), jmp.NoOpLossScale()],
    ids=["dynamic", "static", "none"],
)
def test_steps_of_every_kind_are_one_program(loss_scale):
    counted = _Counted(optax.adam(optax.linear_schedule(1e-3, 0, 10)))
    tx = qstate.with_loss_scale(counted.tx, loss_scale)
    step, state = jax.jit(tx.update), tx.init(PARAMS)
    types = jax.tree.map(jax.typeof, state)
    _, state = step(GOOD, state, PARAMS)
    traces = counted.traces
    for gradients in (GOOD, BAD, BAD, GOOD, GOOD, GOOD):
        assert jax.tree.map(jax.typeof, state) == types
        _, state = step(gradients, state, PARAMS)
    assert step._cache_size() == 1
    assert counted.traces == traces > 0
    # What init gives under jit is the same program's input.
    step(GOOD, jax.jit(tx.init)(PARAMS), PARAMS)
    assert step._cache_size() == 1


def test_eager_steps_compile_nothing_anew(caplog):
    tx = qstate.with_loss_scale(optax.adam(1e-3), dynamic())
    state = tx.init(PARAMS)
    for gradients in (GOOD, BAD, GOOD):
        _, state = tx.update(gradients, state, PARAMS)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for gradients in (GOOD, BAD):
            _, state = tx.update(gradients, state, PARAMS)
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        jax.jit(lambda x: x * 17 + 3)(jnp.ones(11))
        assert [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_what_the_state_holds():
    state = qstate.with_loss_scale(optax.adam(1e-3), dynamic()).init(PARAMS)
    assert isinstance(state, LossScaleState)
    scalars = jax.tree.leaves(state._replace(inner_state=()))
    assert [(x.shape, str(x.dtype)) for x in scalars] == [
        ((), "float32"),
        ((), "int32"),
        ((), "int32"),
        ((), "int32"),
    ]


def test_strict_dtype_promotion():
    tx = qstate.with_loss_scale(optax.sgd(1.0, momentum=0.9), dynamic(period=1))
    with jax.numpy_dtype_promotion("strict"):
        state = jax.jit(tx.init)(PARAMS)
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            for gradients in (GOOD, BAD):
                gradients = {"w": gradients["w"].astype(dtype)}
                for update in (tx.update, jax.jit(tx.update)):
                    _, state = update(gradients, state, PARAMS)
        qstate.loss_scale(state)
    assert int(state.total_notfinite) == 6


# What is refused.


@pytest.mark.parametrize("loss_scale", [2.0**15, None, jmp.DynamicLossScale, "dynamic"], ids=repr)
def test_what_is_no_loss_scale_is_refused(loss_scale):
    with pytest.raises(TypeError, match=r"loss_scale is jmp\.NoOpLossScale\(\).*; got "):
        qstate.with_loss_scale(optax.sgd(1.0), loss_scale)


@pytest.mark.parametrize(
    ("loss_scale", "settings", "message"),
    [
        (dynamic(period=0), {}, r"grows after period >= 1 clean steps, got 0"),
        (dynamic(factor=1), {}, r"factor is a number above 1, got 1\.0"),
        (dynamic(factor=0.5), {}, r"factor is a number above 1, got 0\.5"),
        (dynamic(factor=float("nan")), {}, r"factor is a number above 1, got nan"),
        (dynamic(factor=float("inf")), {}, r"factor is a number above 1, got inf"),
        (dynamic(min_loss_scale=jnp.float32(0)), {}, r"smallest loss scale \(0\) must be positive"),
        (dynamic(min_loss_scale=jnp.float32(-1)), {}, r"smallest loss scale \(-1\) must be"),
        (dynamic(), {"max_loss_scale": 0.5}, r"at most the largest \(0\.5\)"),
        (dynamic(), {"max_loss_scale": float("nan")}, r"at most the largest \(nan\)"),
        (dynamic(), {"max_loss_scale": np.inf}, r"max_loss_scale is 2\^126 at most.*got inf"),
        (dynamic(2.0**127), {"max_loss_scale": 2.0**127}, r"max_loss_scale is 2\^126 at most"),
        (dynamic(2.0**127), {}, r"not between"),
        (dynamic(), {"max_loss_scale": 2.0**10}, r"32768 is not between .* its largest \(1024\)"),
        (dynamic(0.5), {}, r"0\.5 is not between its smallest \(1\).*min_loss_scale"),
        (dynamic(0), {}, r"positive finite number, got 0"),
        (dynamic(-8), {}, r"positive finite number, got -8"),
        (dynamic(np.inf), {}, r"positive finite number, got inf"),
        (dynamic(np.nan), {}, r"positive finite number, got nan"),
        (jmp.StaticLossScale(0.0), {}, r"positive finite number, got 0"),
        (jmp.StaticLossScale(jnp.float32(np.inf)), {}, r"positive finite number, got inf"),
        (jmp.StaticLossScale(2.0**127), {}, r"not between"),
        (
            jmp.DynamicLossScale(jnp.float16(np.inf)),
            {},
            r"got inf \(float16; float16 ends at 65504\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_cannot_work_are_refused_by_the_factory(loss_scale, settings, message):
    with pytest.raises(ValueError, match=message):
        qstate.with_loss_scale(optax.sgd(1.0), loss_scale, **settings)


@pytest.mark.parametrize("smallest", [0.7, 0.1])  # in float32 a bit less, a bit more
def test_a_smallest_scale_that_float32_does_not_have(smallest):
    loss_scale = jmp.DynamicLossScale(jnp.float32(smallest), min_loss_scale=smallest)
    scales, _ = scales_after(loss_scale, [BAD])
    assert scales == [np.float32(smallest)]


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("dtypes", ["half", "params=bfloat16,compute=bfloat16,output=bfloat16"])
@pytest.mark.parametrize("inner", [optax.sgd(1.0), qstate.adamw(1e-3)], ids=["optax", "qstate"])
def test_a_state_that_a_policy_has_cast_is_refused(inner, dtypes, jitted):
    tx = qstate.with_loss_scale(inner, dynamic())
    cast = jmp.get_policy(dtypes).cast_to_compute(tx.init(PARAMS))
    update = jax.jit(tx.update) if jitted else tx.update
    with pytest.raises(TypeError, match=r"the loss scale in .*float16 and has to be float32"):
        update(GOOD, cast, PARAMS)


def test_it_is_a_matter_of_the_caller_that_the_inner_one_gets_parameters():
    tx = qstate.with_loss_scale(optax.add_decayed_weights(0.1), dynamic())
    with pytest.raises(ValueError, match="params"):
        tx.update(GOOD, tx.init(PARAMS))
