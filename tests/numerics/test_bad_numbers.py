"""NaN and infinity: never a number, and never their neighbours' fault."""

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
    INT8,
    UE2M2,
    ULINEAR4,
    Block,
    Codebook,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    decode,
    encode,
    encode_unpacked,
)

bad_numbers = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def kept_of(x, storage):
    return decode(*encode(x, storage, 0), storage, x.shape)


def kept(x, storage):
    return np.asarray(kept_of(jnp.asarray(x, jnp.float32), storage))


def numbers():
    return np.random.default_rng(0).uniform(0.5, 2, (40, 300)).astype(np.float32)


@pytest.mark.parametrize(("rounding", "domain"), [("nearest", "linear"), ("stochastic", "sqrt")])
@bad_numbers
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "power_of_two"])
@pytest.mark.parametrize("format", [E4M3, E2M1, UE2M2, INT8, DYNAMIC8, ULINEAR4], ids=str)
def test_only_the_bad_block_is_nan(format, scale, bad, rounding, domain):
    if isinstance(format, Codebook) and scale == "power_of_two":
        scale = "float32"  # a codebook has no power of two
    x = numbers()
    storage = Storage(format, Block(128, scale), rounding, domain)
    good = kept(x, storage)
    x[2, 200] = bad
    got = kept(x, storage)
    hit = np.zeros(x.shape, bool)
    hit[2, 128:256] = True
    assert np.isnan(got[hit]).all()
    np.testing.assert_array_equal(got[~hit], good[~hit])


@bad_numbers
@pytest.mark.parametrize("format", [ULINEAR4, E4M3, DYNAMIC8], ids=str)
def test_only_the_bad_element_is_nan_under_rank_1(format, bad):
    x = numbers()
    x[2, 200] = bad
    got = kept(x, Storage(format, Rank1()))
    finite = np.isfinite(x)
    np.testing.assert_array_equal(np.isnan(got), ~finite)
    # Its row and its column are left with one scale each, which is enough.
    assert (np.abs(got - x)[finite] <= 2 / 8).all()


@bad_numbers
def test_rank_1_of_three_axes_and_of_one(bad):
    x = numbers().reshape(40, 15, 20)
    x[3, 4, 5] = bad
    got = jax.jit(kept_of, static_argnums=1)(x, Storage(E4M3, Rank1()))
    np.testing.assert_array_equal(np.isnan(got), ~np.isfinite(x))
    got = jax.jit(kept_of, static_argnums=1)(x.reshape(-1), Storage(E4M3, Rank1()))
    assert np.isnan(got).all()


@pytest.mark.parametrize("scaling", [NoScale(), PerTensor()], ids=str)
@pytest.mark.parametrize("format", [E2M1, UE2M2, INT8, DYNAMIC8, ULINEAR4], ids=str)
@bad_numbers
def test_the_whole_tensor_where_it_has_one_scale(format, scaling, bad):
    x = numbers()
    x[2, 200] = bad
    assert np.isnan(kept(x, Storage(format, scaling))).all()


@roundings
@pytest.mark.parametrize("format", [BF16, F16, E4M3, E5M2], ids=str)
def test_formats_with_nan_keep_what_is_bad_in_place(format, rounding):
    x = numbers()
    storage = Storage(format, NoScale(), rounding)
    good = kept(x, storage)
    places = [(0, 0), (2, 200), (39, 299)]
    for place, bad in zip(places, [np.nan, np.inf, -np.inf], strict=True):
        x[place] = bad
    got = kept(x, storage)
    want = good.copy()
    infinite = np.isinf(format.grid()).any()  # e4m3 has no infinity
    for place in places:
        want[place] = x[place] if infinite else np.nan
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", [BF16, F16, E4M3, E5M2], ids=str)
def test_every_nan_stays_nan_for_every_draw(format):
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], np.uint32)
    x = np.repeat(bits.view(np.float32), 2**16)
    draws = np.tile(np.arange(2**16, dtype=np.uint32), len(bits))
    storage = Storage(format, NoScale(), "stochastic")
    codes, _ = jax.jit(encode_unpacked, static_argnums=1)(x, storage, draws)
    assert np.isnan(decode(codes, None, storage, x.shape)).all()


@bad_numbers
def test_bad_numbers_in_the_last_block_that_is_not_full(bad):
    x = numbers()
    x[1, 299] = bad
    hit = np.zeros(x.shape, bool)
    hit[1, 256:] = True
    for format in (E4M3, E2M1):
        got = kept(x, Storage(format, Block(128)))
        np.testing.assert_array_equal(np.isnan(got), hit)


@bad_numbers
def test_bad_numbers_in_a_small_array(bad):
    x = np.ones((2, 128), np.float32)
    x[1, 5] = bad
    for storage in (Storage(E4M3, Block(128)), Storage(UE2M2, Block(128, "power_of_two"))):
        got = jax.jit(kept_of, static_argnums=1)(x, storage)
        np.testing.assert_array_equal(np.isnan(got), [[False] * 128, [True] * 128])
