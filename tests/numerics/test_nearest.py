"""Nearest rounding: ties to even, saturation, and every scaling within half a gap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qstate.numerics import (
    BF16,
    DYNAMIC8,
    E2M1,
    E4M3,
    E5M2,
    F16,
    FORMATS,
    UE2M2,
    Block,
    Codebook,
    Minifloat,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    decode,
    encode,
)

LARGEST = np.finfo(np.float32).max
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


@functools.partial(jax.jit, static_argnums=1)
def kept(x, storage):
    """What is read back of ``x``."""
    codes, scales = encode(x, storage)
    return decode(codes, scales, storage, x.shape)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
        pytest.param(E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
        pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
        pytest.param(BF16, ml_dtypes.bfloat16, id="bf16"),
        pytest.param(F16, np.float16, id="f16"),
        pytest.param(Minifloat("e3m4", 3, 4, specials="ieee"), ml_dtypes.float8_e3m4, id="e3m4"),
        pytest.param(Minifloat("e2m3", 2, 3), ml_dtypes.float6_e2m3fn, id="e2m3"),
    ],
)
def test_nearest_is_ml_dtypes_cast(format, dtype, grid_of, wide):
    x = [wide]
    if format.name in FORMATS:
        x.append(grid_of(format).awkward())
    x = np.concatenate(x)
    got = np.asarray(kept(x, Storage(format)))
    want = np.clip(x, -format.top, format.top).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_nearest_is_the_oracles(format, grid_of, wide):
    grid = grid_of(format)
    x = np.concatenate([grid.awkward(), wide])
    if isinstance(format, Codebook):
        # float32 cannot hold every tie: a hair off one, both neighbours are right.
        x = x[np.abs(grid.around(x)[2] - 0.5) > 1e-5]
    got = np.asarray(kept(x, Storage(format)))
    np.testing.assert_array_equal(got, grid.nearest(x).astype(np.float32))


def test_scaled_values_are_within_half_a_gap(scaled, grid_of):
    format, scaling = scaled.format, scaled.scaling
    grid = grid_of(format)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 300)) * np.exp(rng.normal(size=(40, 300)))
    x *= 10.0 ** rng.integers(-28, 29, (40, 1))
    x = x.astype(np.float32) if format.signed else np.abs(x).astype(np.float32)
    codes, scales = encode(x, scaled)
    got = np.asarray(decode(codes, scales, scaled, x.shape), np.float64)

    scale = scale_oracle(x, format, scaling)
    if scaling.scale == "bfloat16":  # 7 bits of the largest magnitude, which may saturate
        stored = np.repeat(np.asarray(scales, np.float64), 128, 1)[:, : x.shape[1]] / format.top
        assert ((stored > scale * (1 - 2.0**-7)) & (stored < scale * (1 + 2.0**-14))).all()
        scale = stored
    y = x / scale
    low, high, _ = grid.around(y)
    error = np.abs(got / scale - np.clip(y, grid.bottom, grid.top))
    # float32's own rounding of the quotient, and of the product that reads it back.
    assert (error <= 0.5 * (high - low) + 4e-7 * np.abs(y)).all()
    if scaling.scale != "bfloat16":
        assert (np.abs(y) <= max(grid.top, -grid.bottom) * (1 + 1e-6)).all()


def scale_oracle(x, format, scaling):
    """The number that 1.0 on the grid stands for, for every element, in float64."""
    u = np.abs(x.astype(np.float64))
    if format.signed and format.bottom != -format.top:
        u = np.where(x < 0, u * (format.top / -format.bottom), u)
    if isinstance(scaling, PerTensor):
        return np.full(x.shape, u.max() / format.top)
    if isinstance(scaling, Rank1):
        return np.minimum(u.max(0, keepdims=True), u.max(1, keepdims=True)) / format.top
    edges = range(0, x.shape[1], 128)
    largest = np.concatenate(
        [np.repeat(u[:, i : i + 128].max(1, keepdims=True), 128, 1) for i in edges], axis=1
    )[:, : x.shape[1]]
    if scaling.scale == "power_of_two":  # the smallest that does not saturate
        return 2.0 ** np.ceil(np.log2(largest / format.top))
    return largest.astype(np.float64) / format.top


def test_finite_numbers_saturate(format, grid_of):
    x = np.array([format.top * 1.04, format.top * 100, 3.4e38, LARGEST], np.float64)
    x = np.resize(np.minimum(x, LARGEST).astype(np.float32), (40, 300))
    bottom = grid_of(format).bottom if format.signed else 0.0
    for sign, end in ((1, grid_of(format).top), (-1, bottom)):
        codes, scales = encode(sign * x, Storage(format))
        got = decode(codes, scales, Storage(format), x.shape)
        np.testing.assert_array_equal(got, np.float32(end))


@roundings
def test_the_largest_float32_stays_finite(scaled, rounding):
    storage = dataclasses.replace(scaled, rounding=rounding)
    x = np.resize(np.array([LARGEST, -LARGEST, LARGEST / 2, 1.0], np.float32), (40, 300))
    codes, scales = encode(x, storage, 0)
    got = np.asarray(decode(codes, scales, storage, x.shape))
    assert np.isfinite(got).all()
    assert got[0, 0] >= 0.7 * LARGEST  # a power of two ends at 2^127


@roundings
@pytest.mark.parametrize(
    ("format", "scaling"),
    [
        (BF16, NoScale()),
        (E4M3, Block(128, "power_of_two")),
        (UE2M2, Block(128, "bfloat16")),
        (DYNAMIC8, Block(128)),
    ],
    ids=str,
)
def test_the_largest_float32_stays_finite_as_a_root(format, scaling, rounding):
    """Even where its root is rounded up to 2^64."""
    storage = Storage(format, scaling, rounding, domain="sqrt")
    x = jnp.full((40, 300), LARGEST)
    codes, scales = encode(x, storage, 0)
    assert np.isfinite(decode(codes, scales, storage, x.shape)).all()
