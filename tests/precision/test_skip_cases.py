"""A skipped step changes nothing but the loss scale, whatever is inside and whatever is around."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

SCALE = 2.0**10


def dynamic(scale=SCALE, **settings):
    return jmp.DynamicLossScale(jnp.float32(scale), **settings)


def schedule():
    return optax.linear_schedule(1e-2, 1e-3, 10)


def nothing(path, leaf):
    """An ``exempt`` that exempts no leaf."""
    return False


def adamw(storage="fp8", **settings):
    return qstate.adamw(schedule(), weight_decay=0.1, storage=storage, exempt=nothing, **settings)


INNER = {
    "adamw-fp8-reset": lambda: adamw(reset=qstate.every(3)),
    "adamw-fp4-soft-reset": lambda: adamw("fp4", reset=qstate.every(3, kind="soft")),
    "adamw-int8-adaptive": lambda: adamw("int8", reset=qstate.adaptive()),
    "quantize_state": lambda: qstate.quantize_state(optax.adam(schedule()), "fp8"),
    "optax-chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule(), weight_decay=0.1)
    ),
    "scale-decay-schedule": lambda: optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(schedule()),
    ),
    "momentum": lambda: optax.sgd(schedule(), momentum=0.9),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.adam(1e-3)),
    "multi-steps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "master-weights": lambda: qstate.with_master_weights(adamw()),
    "remainder-16": lambda: qstate.with_master_weights(optax.adamw(1e-2), remainder=16),
    "stochastic-rounding": lambda: optax.chain(adamw(), qstate.stochastic_round_params(1)),
}
SLOW = ("adamw-int8-adaptive", "momentum", "noise", "remainder-16")  # others run the same code
NARROW = ("master-weights", "remainder-16", "stochastic-rounding")


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 256))
    w[3, 7] = w[5] = -0.0
    params = {"w": w, "b": np.array([-0.0, 0.0, 1.5, -2.0, 65504.0, -(2.0**-24), 1e-3])}
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), params)


def gradients(step, scale, dtype=jnp.float32):
    """Those of a step, multiplied by a scale: by a power of two, so exactly."""
    rng = np.random.default_rng(100 + step)
    draw = lambda p: jnp.asarray(rng.normal(size=p.shape), dtype)  # noqa: E731
    return jax.tree.map(lambda p: draw(p) * jnp.asarray(scale, dtype), parameters())


def with_one_bad(tree, bad):
    """Replaces a single number of a single leaf."""
    return {**tree, "w": tree["w"].at[15, 255].set(bad)}


def stepper(tx):
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def bits(x):
    """The bytes of an array, or of a JAX key."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    leaves = jax.tree.leaves_with_path(tree)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert bits(a) == bits(b), where


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in INNER],
)
def inner(request):
    """An optimizer, a jitted step of it wrapped, and parameters in the dtype that suits it."""
    name = request.param
    tx = qstate.with_loss_scale(INNER[name](), dynamic())
    return tx, jax.jit(stepper(tx)), parameters(jnp.bfloat16 if name in NARROW else jnp.float32)


def test_one_bad_number_changes_nothing_but_the_scale(inner):
    tx, step, params = inner
    state = tx.init(params)
    for number, bad in enumerate([np.inf, np.nan, -np.inf]):
        scale = float(state.scaler.value)
        after, skipped = step(params, state, with_one_bad(gradients(number, scale), bad))
        assert_same_bits(after, params)
        assert_same_bits(skipped.inner_state, state.inner_state)
        assert float(skipped.scaler.value) == scale / 2
        assert int(skipped.scaler.counter) == 0
        assert (int(skipped.notfinite_count), int(skipped.total_notfinite)) == (1, number + 1)
        # It goes on from the skipped state.
        params, state = step(params, skipped, gradients(number, scale / 2))
        assert (int(state.notfinite_count), int(state.scaler.counter)) == (0, 1)


def test_a_run_with_skipped_steps_equals_the_run_without_them(inner):
    tx, step, params = inner
    clean, dirty = (params, tx.init(params)), (params, tx.init(params))
    for number in range(5):
        clean = step(*clean, gradients(number, float(clean[1].scaler.value)))
        for bad in [np.nan, -np.inf][: (2 * number) % 3]:
            scale = float(dirty[1].scaler.value)
            dirty = step(*dirty, with_one_bad(gradients(99, scale), bad))
        dirty = step(*dirty, gradients(number, float(dirty[1].scaler.value)))
    assert int(dirty[1].total_notfinite) == 5
    assert int(clean[1].total_notfinite) == 0
    assert_same_bits(dirty[0], clean[0])
    assert_same_bits(dirty[1].inner_state, clean[1].inner_state)


@pytest.mark.parametrize("name", ["optax-chain", "quantize_state"])
def test_eager_steps_skip_alike(name):
    tx, params = qstate.with_loss_scale(INNER[name](), dynamic()), parameters()
    step = stepper(tx)
    state = step(params, tx.init(params), gradients(0, SCALE))[1]
    after, skipped = step(params, state, with_one_bad(gradients(1, SCALE), np.nan))
    assert_same_bits(after, params)
    assert_same_bits(skipped.inner_state, state.inner_state)
    assert float(skipped.scaler.value) == SCALE / 2


def test_master_weights_around_the_loss_scale_do_not_move():
    tx = qstate.with_master_weights(qstate.with_loss_scale(adamw(), dynamic()))
    step, params = jax.jit(stepper(tx)), parameters(jnp.bfloat16)
    params, state = step(params, tx.init(params), gradients(0, SCALE))
    after, skipped = step(params, state, with_one_bad(gradients(1, SCALE), np.inf))
    assert_same_bits(after, params)
    assert_same_bits(skipped.master, state.master)
    assert_same_bits(skipped.inner_state.inner_state, state.inner_state.inner_state)
    assert float(qstate.loss_scale(skipped).loss_scale) == SCALE / 2


def test_resets_count_applied_steps():
    """The reset of a period of 5 follows the fifth step that is taken, whatever was skipped."""
    tx = qstate.with_loss_scale(adamw(reset=(qstate.every(5), qstate.every(5))), dynamic())
    step, params = jax.jit(stepper(tx)), parameters()
    state, ages, skips = tx.init(params), [], [2, 3, 6, 8, 9]
    for number in range(15):
        g = gradients(number, float(state.scaler.value))
        g = with_one_bad(g, np.inf) if number in skips else g
        params, state = step(params, state, g)
        adam = state.inner_state[0]
        assert int(adam.mu.age) == int(adam.nu.age)
        ages.append(int(adam.nu.age))
        codes = jax.tree.leaves((adam.mu.codes, adam.nu.codes))
        assert any(np.asarray(c).tobytes().strip(b"\0") for c in codes) == (ages[-1] > 0)
    assert ages == [1, 2, 2, 2, 3, 4, 4, 0, 0, 0, 1, 2, 3, 4, 0]


def test_without_the_guard_the_same_chain_is_spoiled():
    """So that the tests above are known to be able to fail."""
    tx = INNER["scale-decay-schedule"]()
    step, params = jax.jit(stepper(tx)), parameters()
    after, state = step(params, tx.init(params), with_one_bad(gradients(0, 1.0), np.inf))
    assert np.isnan(after["w"]).any()
    assert int(state[0].count) == int(state[2].count) == 1


# Accumulation.


def test_an_overflow_in_a_micro_batch_is_left_out_of_the_accumulator():
    """The documented nesting: MultiSteps inside. The scale backs off at once."""
    accumulating = optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
    tx = qstate.with_loss_scale(accumulating, dynamic(8.0))
    params = {"w": jnp.zeros(2)}
    step, state = jax.jit(stepper(tx)), tx.init(params)
    given = [[1, 2], [np.inf, 5], [3, 4], [np.nan, 6], [8, 9]]
    seen = []
    for g in given:
        scaled = {"w": jnp.float32(g) * state.scaler.value}
        params, state = step(params, state, scaled)
        inside = state.inner_state
        seen.append((int(inside.mini_step), int(inside.gradient_step), float(state.scaler.value)))
    assert seen == [(1, 0, 8.0), (1, 0, 4.0), (2, 0, 4.0), (2, 0, 2.0), (0, 1, 2.0)]
    np.testing.assert_array_equal(params["w"], [-4.0, -5.0])
    np.testing.assert_array_equal(state.inner_state.acc_grads["w"], [0.0, 0.0])


def test_the_other_nesting_loses_its_accumulator_but_nothing_else():
    """MultiSteps outside: optax multiplies its accumulator by 0, so an infinity stays as NaN."""
    tx = optax.MultiSteps(
        qstate.with_loss_scale(optax.adamw(1e-2), dynamic(8.0)), 2
    ).gradient_transformation()
    params = {"w": jnp.array([1.0, -0.0])}
    step, state = jax.jit(stepper(tx)), tx.init(params)
    for g in ([1, 2], [3, 4]):
        params, state = step(params, state, {"w": jnp.float32(g) * 8})
    before = state.inner_opt_state
    assert int(before.inner_state[0].count) == 1
    scales = []
    for g in ([np.inf, 1], [1, 1], [1, 1], [1, 1]):
        after, state = step(params, state, {"w": jnp.float32(g) * 8})
        assert_same_bits(after, params)
        assert_same_bits(state.inner_opt_state.inner_state, before.inner_state)
        scales.append(float(qstate.loss_scale(state).loss_scale))
    assert scales == [8.0, 4.0, 4.0, 2.0]
    assert np.isnan(state.acc_grads["w"][0])


# What JAX puts around a step.


def _history(steps=12, bad=(0, 4, 5, 9)):
    """Gradients of scale 1, some bad."""
    history = [gradients(n, 1.0) for n in range(steps)]
    return [with_one_bad(g, np.nan) if n in bad else g for n, g in enumerate(history)]


def test_scan_equals_a_python_loop():
    tx = qstate.with_loss_scale(adamw(reset=qstate.every(3)), dynamic(4.0, period=2))

    def step(carry, g):
        params, state = carry
        g = jax.tree.map(lambda g: g * qstate.loss_scale(state).loss_scale, g)
        return stepper(tx)(params, state, g), state.scaler.value

    start, history = (parameters(), tx.init(parameters())), _history()
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *history)
    scanned, scales = jax.jit(lambda c, g: jax.lax.scan(step, c, g))(start, stacked)
    carry, one, looped = start, jax.jit(step), []
    for g in history:
        carry, scale = one(carry, g)
        looped.append(float(scale))
    assert looped == scales.tolist() == [4, 2, 2, 4, 4, 2, 1, 1, 2, 2, 1, 1]
    assert_same_bits(scanned, carry)


@pytest.mark.filterwarnings("ignore:parameters in 16 bits")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
def test_inside_of_a_cond_on_16_bit_parameters(dtype):
    tx = qstate.with_loss_scale(optax.adamw(1e-2), dynamic(4.0))
    params = {"w": jnp.ones(3, dtype)}
    state = tx.init(params)

    @jax.jit
    def step(take, g, state):
        idle = lambda g, state: ({"w": jnp.zeros(3)}, state)  # noqa: E731
        return jax.lax.cond(take, lambda g, s: tx.update(g, s, params), idle, g, state)

    good, bad = {"w": jnp.full(3, 4, dtype)}, {"w": jnp.array([1, jnp.inf, 1], dtype)}
    for take, g, counts in [(True, good, (1, 0)), (False, bad, (1, 0)), (True, bad, (1, 1))]:
        _, after = step(take, g, state)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
        state = after
        assert (int(state.inner_state[0].count), int(state.total_notfinite)) == counts


def _three_lanes(axis_name=None):
    tx = qstate.with_loss_scale(adamw(), dynamic(), axis_name=axis_name)
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    params, state = parameters(), tx.init(parameters())
    good = gradients(0, SCALE)
    lanes = stack(good, with_one_bad(good, np.nan), good)
    step = jax.jit(jax.vmap(stepper(tx), axis_name=axis_name))
    after = step(stack(*[params] * 3), stack(*[state] * 3), lanes)
    return tx, (params, state), [jax.tree.map(lambda x, i=i: x[i], after) for i in range(3)]


def test_vmap_skips_by_lane():
    tx, start, lanes = _three_lanes()
    stepped = jax.jit(stepper(tx))(*start, gradients(0, SCALE))
    for lane in (lanes[0], lanes[2]):
        assert_same_bits(lane[1].inner_state, stepped[1].inner_state)
        assert float(lane[1].scaler.value) == SCALE
    assert_same_bits(lanes[1][0], start[0])
    assert_same_bits(lanes[1][1].inner_state, start[1].inner_state)
    assert float(lanes[1][1].scaler.value) == SCALE / 2


def test_vmap_with_a_named_axis_skips_in_all_lanes():
    _, start, lanes = _three_lanes("lanes")
    for lane in lanes:
        assert_same_bits(lane[0], start[0])
        assert_same_bits(lane[1].inner_state, start[1].inner_state)
        assert float(lane[1].scaler.value) == SCALE / 2
