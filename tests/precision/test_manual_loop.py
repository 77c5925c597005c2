"""Against the loop that people write by hand: float16 copies, float32 weights, a scaled loss.

The loop of this file knows nothing of the package nor of optax.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

STEPS, BATCH, WIDTH, HIDDEN = 50, 16, 32, 64
RATE, B1, B2, EPS, DECAY = 3e-4, 0.9, 0.999, 1e-8, 1e-4
PERIOD = 15
FIRST_SCALE = 2.0**26  # float16 ends under 2^16: the first gradients of both matrices overflow


def _weights():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(k1, (WIDTH, HIDDEN)) * 0.1,
        "w2": jax.random.normal(k2, (HIDDEN, WIDTH)) * 0.1,
    }


def _batches():
    teacher = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) * 0.3
    for step in range(STEPS):
        x = jax.random.normal(jax.random.key(100 + step), (BATCH, WIDTH))
        yield x, jnp.tanh(x @ teacher)


def _loss(params, x, y):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ half["w1"])
    prediction = hidden @ half["w2"]
    return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)


@functools.cache
def by_hand():
    """Loss and scale of each step, and the steps skipped."""
    params = _weights()
    m = jax.tree.map(jnp.zeros_like, params)
    v = jax.tree.map(jnp.zeros_like, params)
    scale, good, taken = FIRST_SCALE, 0, 0
    losses, scales, skipped = [], [], []
    backward = jax.jit(
        jax.value_and_grad(
            lambda p, x, y, scale: (_loss(p, x, y) * scale, _loss(p, x, y)), has_aux=True
        )
    )
    for step, (x, y) in enumerate(_batches()):
        (_, loss), grads = backward(params, x, y, scale)
        losses.append(float(loss))
        scales.append(scale)
        if not all(bool(jnp.isfinite(g).all()) for g in grads.values()):
            scale, good = scale * 0.5, 0
            skipped.append(step)
            continue
        taken += 1
        for name, g in grads.items():
            g = g / scale
            m[name] = B1 * m[name] + (1 - B1) * g
            v[name] = B2 * v[name] + (1 - B2) * g * g
            direction = (m[name] / (1 - B1**taken)) / (jnp.sqrt(v[name] / (1 - B2**taken)) + EPS)
            params[name] = params[name] - RATE * (direction + DECAY * params[name])
        good += 1
        if good == PERIOD:
            scale, good = scale * 2.0, 0
    return losses, scales, skipped, params


@functools.cache
def with_the_wrapper(storage=None):
    """The same of a jitted loop around the wrapped optimizer."""
    optimizer = (
        optax.adamw(RATE, weight_decay=DECAY)
        if storage is None
        else qstate.adamw(
            RATE, weight_decay=DECAY, storage=storage, exempt=lambda path, leaf: False
        )
    )
    tx = qstate.with_loss_scale(
        optimizer, jmp.DynamicLossScale(jnp.float32(FIRST_SCALE), period=PERIOD)
    )

    @jax.jit
    def step(params, state, x, y):
        scale = qstate.loss_scale(state)

        def scaled(p):
            loss = _loss(p, x, y)
            return scale.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, scale.loss_scale

    params = _weights()
    state = tx.init(params)
    losses, scales, skipped = [], [], []
    for number, (x, y) in enumerate(_batches()):
        before = int(state.total_notfinite)
        params, state, loss, scale = step(params, state, x, y)
        losses.append(float(loss))
        scales.append(float(scale))
        if int(state.total_notfinite) > before:
            skipped.append(number)
    return losses, scales, skipped, params


storages = pytest.mark.parametrize("storage", [None, "fp32"], ids=["optax", "qstate"])


def test_the_loop_by_hand_overflows_at_first_and_after_growing():
    """Else the tests below would compare nothing."""
    losses, scales, skipped, _ = by_hand()
    assert skipped[:2] == [0, 1]
    assert max(skipped) > PERIOD
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


@storages
def test_steps_are_skipped_and_scales_moved_as_by_hand(storage):
    _, scales, skipped, _ = by_hand()
    assert with_the_wrapper(storage)[1:3] == (scales, skipped)


@storages
def test_losses_are_those_of_the_loop_by_hand(storage):
    """Within float16 noise.

    The weights differ by float32's roundings, and so a few of their float16 copies by one last
    place, 2^-10 of a weight; the mean over 512 outputs leaves less than a tenth of that.
    """
    losses, _, _, params = by_hand()
    wrapped_losses, _, _, wrapped_params = with_the_wrapper(storage)
    np.testing.assert_allclose(wrapped_losses, losses, rtol=2.0**-14)
    for name, w in params.items():
        np.testing.assert_allclose(wrapped_params[name], w, rtol=0, atol=0.05 * RATE)


def test_averages_in_8_bits_skip_in_the_same_steps():
    losses, scales, skipped, _ = by_hand()
    assert with_the_wrapper("fp8")[1:3] == (scales, skipped)
    np.testing.assert_allclose(with_the_wrapper("fp8")[0], losses, rtol=0.005)


def _small_gradients(wrapped, steps=30):
    """A linear fit of targets near 2^-17: the slope at each of 8192 outputs is below 2^-25.

    Returns:
      The loss before and after, the gradients of every step, and the parameters.
    """
    x = jax.random.normal(jax.random.key(0), (8192, 8))
    y = x @ jnp.linspace(-1, 1, 8) * 2.0**-17
    params = jnp.zeros(8)

    def loss(params):
        prediction = x.astype(jnp.float16) @ params.astype(jnp.float16)
        return jnp.mean((prediction.astype(jnp.float32) - y) ** 2)

    tx = optax.sgd(0.2)
    if wrapped:
        tx = qstate.with_loss_scale(tx, jmp.DynamicLossScale(jnp.float32(2.0**15)))

    @jax.jit
    def step(params, state):
        scale = qstate.loss_scale(state) if wrapped else jmp.NoOpLossScale()
        grads = jax.grad(lambda p: scale.scale(loss(p)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    before, state, history = float(loss(params)), tx.init(params), []
    for _ in range(steps):
        params, state, grads = step(params, state)
        history.append(np.asarray(grads))
    return before, float(loss(params)), history, params


def test_gradients_below_what_float16_has_are_zero_without_the_wrapper():
    before, after, gradients, params = _small_gradients(wrapped=False)
    assert not np.any(gradients)
    assert not np.any(params)
    assert after == before


def test_the_same_model_learns_with_the_wrapper():
    before, after, gradients, params = _small_gradients(wrapped=True)
    assert np.all(gradients[0])
    assert after < 0.01 * before
    np.testing.assert_allclose(params, np.linspace(-1, 1, 8) * 2.0**-17, atol=2.0**-21)


def test_dividing_in_float16_would_lose_what_the_scale_kept():
    numbers = np.array([1.0, -1.5, 100.0, 2.0**-10]) * 2.0**-11
    scaled = jnp.asarray(numbers, jnp.float16)
    scale = jnp.float16(2.0**15)
    in_float16 = np.asarray(jmp.StaticLossScale(scale).unscale(scaled), np.float64)
    np.testing.assert_array_equal(in_float16[[0, 1, 3]], 0.0)
    tx = qstate.with_loss_scale(optax.sgd(1.0), jmp.StaticLossScale(scale))
    updates, _ = tx.update(scaled, tx.init(jnp.zeros(4)))
    assert updates.dtype == jnp.float32
    np.testing.assert_array_equal(-np.asarray(updates, np.float64), numbers / 2.0**15)
