"""float32 inside of a 16-bit computation: what it saves, and what it leaves as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qstate

NARROW = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# What is lost without


def sum_of_squares(x):
    return jnp.sum(x * x)


def variance(x):
    return jnp.mean(x * x) - jnp.mean(x) ** 2


def unshifted_softmax(x):
    e = jnp.exp(x)
    return e / jnp.sum(e)


def running_mean(x):
    """One number after the other, in the dtype of all."""
    add = lambda i, total: total + x[i]  # noqa: E731
    return jax.lax.fori_loop(0, x.size, add, jnp.zeros([], x.dtype)) / x.size


def test_a_sum_of_squares_passes_the_end_of_float16():
    x = jnp.full(4096, 10, jnp.float16)
    assert float(sum_of_squares(x)) == np.inf
    island = qstate.fp32_island(sum_of_squares, output_dtype=jnp.float32)
    assert (float(island(x)), island(x).dtype) == (409600.0, jnp.float32)
    mean = qstate.fp32_island(lambda x: sum_of_squares(x) / x.size)
    assert (float(mean(x)), mean(x).dtype) == (100.0, jnp.float16)


@NARROW
def test_a_variance_far_from_zero_cancels(dtype, rng):
    """To less than nothing, or to many times what it is."""
    draws = [jnp.asarray(rng.normal(mean, 0.5, 1024), dtype) for mean in rng.uniform(60, 120, 30)]
    exact = np.array([np.var(np.asarray(x, np.float64)) for x in draws])
    without = np.array([float(variance(x)) for x in draws])
    assert without.min() < 0
    assert (without / exact).max() > 5
    island = qstate.fp32_island(variance)
    assert island(draws[0]).dtype == dtype
    np.testing.assert_allclose([float(island(x)) for x in draws], exact, rtol=0.02)


def test_an_exponential_passes_the_end_of_float16():
    x = jnp.array([12.0, 11.0, 0.0], jnp.float16)
    assert np.isnan(np.asarray(unshifted_softmax(x))).any()
    got = qstate.fp32_island(unshifted_softmax)(x)
    exact = np.exp([12.0, 11.0, 0.0]) / np.exp([12.0, 11.0, 0.0]).sum()
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-10, atol=2.0**-25)


@NARROW
def test_a_long_mean_stops_growing(dtype):
    x = jnp.ones(4096, dtype)
    largest_sum = {jnp.bfloat16: 256, jnp.float16: 2048}[dtype]  # to which 1 can be added
    assert float(running_mean(x)) == largest_sum / 4096
    got = qstate.fp32_island(running_mean)(x)
    assert (float(got), got.dtype) == (1.0, dtype)


# What it leaves as it is


def _seen(*args, **kwargs):
    """What a function gets inside, dtypes in place of arrays."""
    seen = []
    qstate.fp32_island(lambda *a, **k: seen.append((a, k)))(*args, **kwargs)
    return jax.tree.map(lambda x: getattr(x, "dtype", x), seen[0])


@NARROW
def test_narrow_arrays_alone_are_widened(dtype):
    x, f, i = jnp.ones(3, dtype), jnp.ones(3), jnp.arange(3)
    flags, key = jnp.ones(3, bool), jax.random.key(0)
    (got, kwargs) = _seen(
        x,
        f,
        i,
        flags,
        key,
        2,
        0.5,
        "name",
        None,
        [x, {"a": i}],
        scale=x,
        axis=-1,
        np_=np.ones(2, dtype),
    )
    wide = jnp.dtype(jnp.float32)
    assert got[:5] == (wide, wide, i.dtype, flags.dtype, key.dtype)
    assert got[5:] == (2, 0.5, "name", None, [wide, {"a": i.dtype}])
    assert kwargs == {"scale": wide, "axis": -1, "np_": wide}


@NARROW
def test_results_come_back_in_the_compute_dtype(dtype):
    @qstate.fp32_island
    def normalise(x, scale, eps=1e-6):
        y = x / jnp.sqrt(jnp.mean(x * x) + eps) * scale
        assert y.dtype == jnp.float32
        return {"y": y, "largest": jnp.argmax(y), "finite": jnp.isfinite(y), "name": "norm"}

    x = jnp.full(4096, 300.0, dtype)  # its square is infinite in float16
    for scale in (jnp.full(4096, 2.0), jnp.full(4096, 2.0, dtype)):  # float32 or like x
        result = normalise(x, scale)
        assert result["y"].dtype == dtype
        np.testing.assert_array_equal(np.asarray(result["y"], np.float32), 2.0)
        assert (result["largest"].dtype, result["finite"].dtype) == (jnp.int32, jnp.bool_)
        assert result["name"] == "norm"


@pytest.mark.parametrize(
    ("inputs", "output_dtype", "expected"),
    [
        pytest.param(["bfloat16"], None, "bfloat16", id="narrow"),
        pytest.param(["bfloat16", "float32"], None, "bfloat16", id="narrow-and-wide"),
        pytest.param(["bfloat16", "float16"], None, "float32", id="two-narrow"),
        pytest.param(["float32"], None, "float32", id="wide"),
        pytest.param(["float32"], jnp.bfloat16, "bfloat16", id="wide-asked-narrow"),
        pytest.param(["float16"], jnp.float32, "float32", id="narrow-asked-wide"),
        pytest.param(["float16"], jnp.bfloat16, "bfloat16", id="narrow-asked-other"),
    ],
)
def test_the_dtype_of_the_result(inputs, output_dtype, expected):
    island = qstate.fp32_island(lambda *xs: sum(xs), output_dtype=output_dtype)
    result = island(*[jnp.ones(3, dtype) for dtype in inputs])
    assert result.dtype == expected
    np.testing.assert_array_equal(np.asarray(result, np.float32), len(inputs))


def test_float32_in_and_out_is_untouched():
    x = jnp.ones(3)
    assert qstate.fp32_island(lambda x: x)(x) is x


def test_its_name_and_docstring_are_the_functions():
    @qstate.fp32_island
    def loss(x):
        """A loss."""
        return x

    assert (loss.__name__, loss.__doc__) == ("loss", "A loss.")
    assert loss.__wrapped__(3) == 3
    typed = functools.partial(qstate.fp32_island, output_dtype=jnp.float32)
    assert typed(sum_of_squares).__name__ == "sum_of_squares"


# What runs it


@NARROW
def test_jit_with_a_static_argument(dtype):
    def total(x, axis, *, keep):
        return jnp.sum(x * x, axis=axis, keepdims=keep)

    x = jnp.full((8, 4096), 10.0, dtype)
    island = qstate.fp32_island(total, output_dtype=jnp.float32)
    got = jax.jit(island, static_argnums=1, static_argnames="keep")(x, 1, keep=True)
    assert (got.shape, got.dtype) == ((8, 1), jnp.float32)
    np.testing.assert_array_equal(got, 409600.0)


@NARROW
def test_gradients_arrive_in_the_dtypes_of_the_inputs(dtype, rng):
    """They are computed in float32: in float16 the exponentials would make them NaN."""
    x = jnp.asarray([12.0, 11.0, 0.0], dtype)
    weights = jnp.asarray([1.0, 2.0, 3.0])
    island = qstate.fp32_island(unshifted_softmax)

    def loss(x, weights):
        return jnp.sum(island(x).astype(jnp.float32) * weights)

    g, g_weights = jax.jit(jax.grad(loss, (0, 1)))(x, weights)
    assert (g.dtype, g_weights.dtype) == (dtype, jnp.float32)
    p = np.exp([12.0, 11.0, 0.0]) / np.exp([12.0, 11.0, 0.0]).sum()
    exact = p * (np.arange(1, 4) - np.sum(p * np.arange(1, 4)))
    np.testing.assert_allclose(np.asarray(g, np.float64), exact, rtol=0.02, atol=1e-7)
    if dtype == jnp.float16:
        plain = lambda x: jnp.sum(unshifted_softmax(x).astype(jnp.float32) * weights)  # noqa: E731
        assert np.isnan(np.asarray(jax.grad(plain)(x))).any()


@NARROW
def test_a_loss_in_float32_gives_narrow_gradients(dtype):
    island = qstate.fp32_island(sum_of_squares, output_dtype=jnp.float32)
    value, g = jax.value_and_grad(island)(jnp.full(4096, 10, dtype))
    assert (float(value), value.dtype, g.dtype) == (409600.0, jnp.float32, dtype)
    np.testing.assert_array_equal(np.asarray(g, np.float32), 20.0)


@NARROW
def test_vmap(dtype):
    x = jnp.full((5, 4096), 10, dtype)
    got = jax.vmap(qstate.fp32_island(sum_of_squares, output_dtype=jnp.float32))(x)
    np.testing.assert_array_equal(got, np.full(5, 409600.0))
    assert jax.vmap(qstate.fp32_island(running_mean))(x).dtype == dtype


def test_one_inside_of_another():
    inner = qstate.fp32_island(sum_of_squares, output_dtype=jnp.float32)
    outer = qstate.fp32_island(lambda x: jnp.sqrt(inner(x) / x.size))
    got = outer(jnp.full(4096, 10, jnp.float16))
    assert (float(got), got.dtype) == (10.0, jnp.float16)
