"""fp8 activations and gradients: what a cast rounds, what its histories see, and that it trains."""

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import pytest

import qstate
from qstate import Fp8Scales, fp8_cast

E4M3_TOP, E5M2_TOP = 448.0, 57344.0


def rounded(x, scale, dtype, top):
    """Reference: x on the grid on which ``scale`` is the largest number, saturating."""
    y = np.clip(np.asarray(x, np.float64) / scale * top, -top, top)
    return y.astype(np.float32).astype(dtype).astype(np.float64) * scale / top


def test_the_forward_pass_is_e4m3_by_the_history():
    x = jax.random.normal(jax.random.key(0), (16, 32))
    scales = Fp8Scales.start(4)
    first, scales = jax.jit(fp8_cast)(x, scales)
    largest = float(jnp.max(jnp.abs(x)))
    expected = rounded(x, largest, ml_dtypes.float8_e4m3fn, E4M3_TOP)
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    assert not np.array_equal(first, x)
    second, scales = jax.jit(fp8_cast)(3 * x, scales)  # outgrows the scale and saturates
    expected = rounded(3 * x, largest, ml_dtypes.float8_e4m3fn, E4M3_TOP)
    np.testing.assert_allclose(second, expected, rtol=1e-6)
    np.testing.assert_allclose(scales.forward, [largest, 3 * largest, largest, 0, 0], rtol=1e-6)


def test_the_gradient_is_e5m2_by_its_own_history():
    x = jax.random.normal(jax.random.key(0), (16, 32))
    g = jax.random.normal(jax.random.key(1), (16, 32)) * 1e-5

    def loss(x, scales):
        y, seen = fp8_cast(x, scales)
        return jnp.sum(y * g), seen

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    scales = Fp8Scales.start()
    (dx, handed_out), seen = step(x, scales)
    largest = float(jnp.max(jnp.abs(g)))
    expected = rounded(g, largest, ml_dtypes.float8_e5m2, E5M2_TOP)
    np.testing.assert_allclose(dx, expected, rtol=1e-6)
    scales = Fp8Scales.merge(seen, handed_out)
    np.testing.assert_allclose(scales.backward[:3], [largest, largest, 0], rtol=1e-6)
    np.testing.assert_allclose(scales.forward[1], jnp.max(jnp.abs(x)), rtol=1e-6)
    np.testing.assert_array_equal(handed_out.forward, 0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_gradient_is_bad_whole_and_forgotten(bad):
    def loss(x, scales, g):
        y, seen = fp8_cast(x, scales)
        return jnp.sum(y * g), seen

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    x, scales = jnp.ones(64), Fp8Scales.start(3)
    g = jnp.ones(64)
    for gradient in (g, g.at[5].set(bad), 2 * g):
        (dx, handed_out), seen = step(x, scales, gradient)
        finite = bool(jnp.isfinite(gradient).all())
        assert bool(jnp.isfinite(dx).all()) == finite
        assert finite or bool(jnp.isnan(dx).all())
        scales = Fp8Scales.merge(seen, handed_out)
    np.testing.assert_allclose(scales.backward[1:], [2, 1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (0, 3)])
def test_dtypes_and_shapes_stay(dtype, shape):
    x = jnp.ones(shape, dtype)
    y, scales = fp8_cast(x, Fp8Scales.start(2), margin=1)
    assert (y.shape, y.dtype, scales.forward.shape) == (shape, jnp.dtype(dtype), (3,))
    np.testing.assert_array_equal(np.asarray(y, np.float32), 1)


def test_history_of_no_length_is_refused():
    with pytest.raises(ValueError, match="history must be an integer, 1 or more; got 0"):
        Fp8Scales.start(0)


def _train(cast, steps=150):
    """Final loss of a small regression; ``cast(name, tensor, scales, seen)`` handles operands."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 32))
    target = jnp.tanh(x @ jax.random.normal(keys[1], (32, 32))) @ jnp.ones((32, 4)) / 8
    params = {
        "first": jax.random.normal(keys[2], (32, 64)) / 6,
        "second": jax.random.normal(keys[3], (64, 4)) / 8,
    }
    names = ("x", "first", "hidden", "second")
    scales = {name: Fp8Scales.start() for name in names}
    tx = qstate.with_loss_scale(optax.adam(3e-3), jmp.NoOpLossScale())

    def loss(params, scales):
        seen = dict(scales)
        first = cast("x", x, scales, seen) @ cast("first", params["first"], scales, seen)
        hidden = cast("hidden", jnp.tanh(first), scales, seen)
        out = hidden @ cast("second", params["second"], scales, seen)
        return jnp.mean((out - target) ** 2), seen

    @jax.jit
    def step(params, state, scales):
        (value, seen), (grads, handed_out) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            params, scales
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, Fp8Scales.merge(seen, handed_out), value

    state = tx.init(params)
    for _ in range(steps):
        params, state, scales, value = step(params, state, scales)
    return float(value)


def test_a_model_trains_in_fp8_as_in_float32():
    def in_fp8(name, tensor, scales, seen):
        tensor, seen[name] = fp8_cast(tensor, scales[name])
        return tensor

    exact = _train(lambda name, tensor, scales, seen: tensor)
    start = _train(lambda name, tensor, scales, seen: tensor, steps=1)
    fp8 = _train(in_fp8)
    assert exact < start / 10
    assert fp8 < 2 * exact + 0.01 * start
