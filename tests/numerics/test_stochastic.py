"""Stochastic rounding: one of the two true neighbours, with the exact linear probability."""

import dataclasses

import jax
import jax.numpy as jnp
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
    INT8,
    UE2M2,
    ULINEAR4,
    Block,
    Codebook,
    Storage,
    decode,
    encode,
    encode_unpacked,
    key_words,
    packed,
    split_key,
)

encode_jit = jax.jit(encode, static_argnums=1)

DRAWS = np.arange(2**16, dtype=np.uint32)  # all that the random bits can be
FLAT = 2**16  # one size for all that is not jitted: every operation compiles once
UNIT = 2.0**-20  # what 1.0 on the grid stands for, where there is a scale


def stochastic(storage, **changes):
    return dataclasses.replace(storage, rounding="stochastic", **changes)


def encode_drawn(x, storage, bits):
    codes, scales = encode_unpacked(x, storage, bits)
    return packed(codes, storage, x.shape), scales


def read(x, storage, bits):
    return decode(*encode_drawn(x, storage, bits), storage, x.shape)


def drawn(x, storage, draws, read=read):
    """What is read back of every number of ``x`` with every draw, ``(draws, numbers)``."""
    shape = len(draws), len(x)
    bits = np.broadcast_to(draws[:, None], shape).reshape(-1)
    got = read(jnp.asarray(np.broadcast_to(x, shape).reshape(-1)), storage, jnp.asarray(bits))
    return np.asarray(got, np.float64).reshape(shape)


def places(grid, fractions, count=31, squared=False):
    """Numbers inside gaps of a grid: both ends, about zero, and at random; 7 fractions each."""
    points = grid.points[grid.points >= 0] if squared else grid.points
    points = points**2 if squared else points
    gaps, zero = len(points) - 1, np.searchsorted(points, 0.0)
    chosen = np.array([0, zero - 1, zero, zero + 1, gaps - 2, gaps - 1])
    chosen = np.concatenate([chosen, np.random.default_rng(0).integers(0, gaps, count - 6)])
    chosen = np.clip(chosen, 0, gaps - 1)
    low, high = points[chosen], points[chosen + 1]
    return low + (high - low) * np.resize(fractions, count)


def test_every_draw_is_a_neighbour_with_its_exact_probability(format, grid_of):
    grid = grid_of(format)
    x = places(grid, [0.5, 0.25, 1 / 3, 0.999, 0.0005, 2.0**-15, 1 - 2.0**-15], 32)
    x = x.astype(np.float32)
    low, high, fraction = grid.around(x)
    got = drawn(x, stochastic(Storage(format)), DRAWS, jax.jit(read, static_argnums=1))
    low, high = low.astype(np.float32), high.astype(np.float32)
    assert ((got == low) | (got == high)).all()
    # 16 bits: the probability is right to half of 2^-16. A codebook's numbers are not exact.
    blur = 2.0**-23 * np.abs(x) / (high - low) if isinstance(format, Codebook) else 0
    assert (np.abs((got == high).mean(0) - fraction) <= 2.0**-17 + blur).all()


@pytest.mark.parametrize("domain", ["linear", "sqrt"])
def test_every_draw_under_a_scale(scaled, domain, grid_of):
    """As above; rounding 4 / scale and two products moves a fraction by 2^-23 of y / gap."""
    format, squared = scaled.format, domain == "sqrt"
    grid = grid_of(format)
    top = grid.top**2 if squared else grid.top
    x = places(grid, [0.5, 0.25, 1 / 3, 0.998, 0.002], squared=squared)
    x = (np.append(x, top) * UNIT).astype(np.float32)
    unit = np.sqrt(UNIT) if squared else UNIT
    if format is F16 and scaled.scaling.scale == "bfloat16":
        unit *= 65536 / 65504  # the largest magnitude in bfloat16, rounded up
    got = drawn(x, stochastic(scaled, domain=domain), DRAWS[16::32])

    y = (np.sqrt(x.astype(np.float64)) if squared else x) / unit
    low, high, fraction = grid.around(y)
    blur = 2.0**-22 * np.abs(y) / (high - low) + 1e-6
    if squared:
        fraction = (x / unit**2 - low**2) / (high**2 - low**2)
        low, high = np.sign(low) * low**2, high**2
        got /= unit**2
    else:
        got /= unit
    near_low = np.abs(got - low) <= 1e-6 * np.abs(low)
    near_high = np.abs(got - high) <= 1e-6 * np.abs(high)
    assert (near_low | near_high).all()
    share = near_high.mean(0)
    assert (np.abs(share - fraction) <= 2.0**-12 + blur).all()


@pytest.mark.parametrize(
    "storage",
    [
        *(Storage(f) for f in (BF16, F16, E4M3, E5M2, E2M1, INT8)),
        *(Storage(f, Block(128)) for f in (E4M3, E2M1, INT8)),
        Storage(E4M3, Block(128, "power_of_two")),
    ],
    ids=str,
)
def test_negatives_mirror(storage):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=FLAT) * np.exp2(rng.integers(-12, 6, FLAT)), jnp.float32)
    bits = jnp.asarray(rng.integers(0, 2**16, FLAT, dtype=np.uint32))
    up, down = (np.asarray(read(y, stochastic(storage), bits)) for y in (x, -x))
    np.testing.assert_array_equal(up.view(np.uint32) ^ (1 << 31), down.view(np.uint32))


EXTREMES = [0, 2**16 - 1]  # the draws that round up all that can be, and the least


def test_grid_values_never_move(format, grid_of):
    x = grid_of(format).by_code.astype(np.float32)
    x = np.resize(x[np.isfinite(x)], FLAT)
    for draw in EXTREMES:
        bits = jnp.full(x.shape, draw, jnp.uint32)
        got = np.asarray(read(jnp.asarray(x), stochastic(Storage(format)), bits))
        np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("name", ["f16", "e4m3", "e5m2", "e2m1", "ue2m2", "ue4m4", "int8"])
def test_grid_values_never_move_under_a_power_of_two(name, grid_of):
    points = grid_of(FORMATS[name]).points
    points = np.append(points, points[-1:]) if len(points) % 2 else points
    # From where the smallest number of the grid is normal to where the largest is finite.
    exponents = np.arange(-126 - int(np.log2(points[points > 0].min())), 112, 5)
    x = np.ldexp(points, exponents[:, None]).astype(np.float32)
    storage = stochastic(Storage(FORMATS[name], Block(len(points), "power_of_two")))
    for draw in EXTREMES:
        got = jax.jit(read, static_argnums=1)(x, storage, np.full(x.shape, draw, np.uint32))
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "ue2m2", "ue4m4", "dynamic4", "ulinear4"])
def test_grid_values_never_move_under_a_float32_scale(name, grid_of):
    """What was read back under a scale of any mantissa stays, whatever is drawn."""
    points, rng = grid_of(FORMATS[name]).points, np.random.default_rng(0)
    storage = stochastic(Storage(FORMATS[name], Block(128)))
    x = rng.choice(points, (FLAT // 128, 128))
    x[:, 0] = points[-1]
    x *= np.exp2(rng.uniform(-80, 80, (len(x), 1)))
    x = jnp.asarray(x.reshape(-1), jnp.float32)
    codes, scales = encode(x, dataclasses.replace(storage, rounding="nearest"))
    x = decode(codes, scales, storage, x.shape)
    for draw in EXTREMES:
        bits = jnp.full(x.shape, draw, jnp.uint32)
        again, scales_again = encode_drawn(x, storage, bits)
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(scales_again, scales)


def mean_of_draws(x, storage, count, encode=encode):
    """Mean of what is read back of ``count`` copies of ``x``, a block's first being the largest."""
    full = np.full(count, x, np.float32)
    if storage.has_scales:
        top = storage.format.top
        full[::128] = top**2 if storage.domain == "sqrt" else top
    key = split_key(key_words(1), 1)[1][0]
    codes, scales = encode(jnp.asarray(full), storage, key)
    got = np.asarray(decode(codes, scales, storage, full.shape), np.float64)
    got = got.reshape(-1, 128)[:, 1:]
    return got.mean(), got.size


@pytest.mark.parametrize(
    ("storage", "x"),
    [
        pytest.param(Storage(E4M3), 0.003, id="e4m3-subnormal"),
        pytest.param(Storage(E4M3), -0.003, id="e4m3-negative-subnormal"),
        pytest.param(Storage(E4M3), 0.015, id="e4m3-below-the-smallest-normal"),
        pytest.param(Storage(E4M3), 1.03, id="e4m3-above-an-edge"),
        pytest.param(Storage(E4M3), 0.99, id="e4m3-below-an-edge"),
        pytest.param(Storage(E4M3), -1.99, id="e4m3-negative-below-an-edge"),
        pytest.param(Storage(E4M3), 440.0, id="e4m3-next-to-the-top"),
        pytest.param(Storage(E4M3, Block(128)), 0.003, id="e4m3-block-subnormal"),
        pytest.param(Storage(E4M3, Block(128)), 447.0, id="e4m3-block-next-to-the-top"),
        pytest.param(Storage(E4M3, Block(128, "bfloat16")), 447.0, id="e4m3-bfloat16-scale"),
        pytest.param(Storage(E4M3, Block(128, "power_of_two")), -3.9, id="e4m3-power-of-two"),
        pytest.param(Storage(E5M2), 3e-5, id="e5m2-subnormal"),
        pytest.param(Storage(E5M2), 57000.0, id="e5m2-next-to-the-top"),
        pytest.param(Storage(BF16), -1.0017, id="bf16-normal"),
        pytest.param(Storage(F16), 1e-7, id="f16-subnormal"),
        pytest.param(Storage(E2M1, Block(128)), -0.2, id="e2m1-subnormal"),
        pytest.param(Storage(E2M1, Block(128)), 5.0, id="e2m1-next-to-the-top"),
        pytest.param(Storage(UE2M2, Block(128)), 3.9, id="ue2m2-below-an-edge"),
        pytest.param(Storage(UE2M2, Block(128), domain="sqrt"), 0.02, id="ue2m2-root-subnormal"),
        pytest.param(Storage(UE2M2, Block(128), domain="sqrt"), 7.5, id="ue2m2-root-normal"),
        pytest.param(Storage(UE2M2, Block(128), domain="sqrt"), 48.0, id="ue2m2-root-top"),
        pytest.param(Storage(E4M3, Block(128), domain="sqrt"), 3.7, id="e4m3-root"),
        pytest.param(Storage(DYNAMIC8, Block(128)), -0.7771, id="dynamic8-negative"),
        pytest.param(Storage(DYNAMIC8, Block(128)), 1e-7, id="dynamic8-about-zero"),
        pytest.param(Storage(ULINEAR4, Block(128)), 0.11, id="ulinear4"),
    ],
)
def test_the_mean_is_the_number(storage, x, grid_of):
    storage, grid = stochastic(storage), grid_of(storage.format)
    mean, count = mean_of_draws(x, storage, FLAT)
    x = float(np.float32(x))
    low, high, p = grid.around(np.sqrt(x) if storage.domain == "sqrt" else x)
    if storage.domain == "sqrt":
        low, high = low**2, high**2
        p = (x - low) / (high - low)
    assert 0 < p < 1
    sigma = (high - low) * np.sqrt(p * (1 - p) / count)
    assert abs(mean - x) < 4 * sigma


@pytest.mark.parametrize(
    "storage",
    [Storage(E4M3), Storage(BF16), Storage(E4M3, Block(128)), Storage(E2M1, Block(128))],
    ids=str,
)
def test_a_two_thousandth_of_a_step_moves(storage, grid_of):
    low, high, _ = grid_of(storage.format).around(1.0)
    p = 0.0005
    x = low + p * (high - low)
    mean, count = mean_of_draws(x, stochastic(storage), 2**20, encode_jit)
    p = (float(np.float32(x)) - low) / (high - low)
    assert abs(mean - low - p * (high - low)) < 4 * (high - low) * np.sqrt(p * (1 - p) / count)


def test_a_key_is_needed():
    with pytest.raises(ValueError, match="needs a key"):
        encode(jnp.ones(4), stochastic(Storage(E4M3)))


def test_the_same_key_gives_the_same_and_another_does_not():
    x = jnp.full(FLAT, 1.03)
    storage = stochastic(Storage(E4M3))
    first, second, other = (np.asarray(encode(x, storage, k)[0]) for k in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()
