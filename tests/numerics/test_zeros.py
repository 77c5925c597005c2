"""What zeros become, and what never becomes one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qstate.numerics import (
    BF16,
    E2M1,
    E4M3,
    F16,
    UDYNAMIC8,
    UE2M2,
    ULINEAR4,
    Block,
    Rank1,
    Storage,
    decode,
    encode,
    storage,
)

roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


SHAPE = (40, 300)  # one for all: not jitted, every operation compiles once


def kept(x, storage, key=0):
    codes, scales = encode(jnp.asarray(x, jnp.float32), storage, key)
    return np.asarray(decode(codes, scales, storage, np.shape(x)))


def everything(storage):
    """As stored with and without zero, with both roundings, in both domains."""
    for format in (storage.format, storage.format.without_zero()):
        for rounding in ("nearest", "stochastic"):
            for domain in ("linear", "sqrt"):
                yield Storage(format, storage.scaling, rounding, domain)


def test_zeros_are_codes_and_scales_of_zero(narrow):
    for held in everything(narrow):
        codes, scales = encode(jnp.zeros(SHAPE), held, 0)
        for part in jax.tree.leaves((codes, scales)):
            assert not any(np.asarray(part).tobytes())
        np.testing.assert_array_equal(decode(codes, scales, held, SHAPE), 0.0)


def test_codes_and_scales_of_zero_are_zeros(narrow):
    """A reset writes zeros into codes and scales without encoding any."""
    for held in everything(narrow):
        blank = jax.tree.map(jnp.zeros_like, encode(jnp.ones(SHAPE), held, 0))
        np.testing.assert_array_equal(decode(*blank, held, SHAPE), 0.0)


def test_negative_zeros_read_back_as_zeros(narrow):
    for held in everything(narrow):
        np.testing.assert_array_equal(kept(np.full(SHAPE, -0.0), held), 0.0)


@pytest.mark.parametrize("format", [BF16, F16, E4M3], ids=str)
def test_the_sign_of_zero_is_kept_without_a_scale(format):
    got = kept(np.resize([0.0, -0.0, 1e-12, -1e-12], SHAPE), Storage(format))
    np.testing.assert_array_equal(np.signbit(got), np.resize([False, True], SHAPE))


def test_zero_blocks_beside_others(scaled):
    x = np.random.default_rng(0).uniform(0.1, 5, SHAPE).astype(np.float32)
    some, none = x.copy(), x.copy()
    some[1::4], none[1::4] = 0.05, 0.0  # under any other scale than their own block's
    got = kept(none, scaled)
    np.testing.assert_array_equal(
        np.delete(got, np.s_[1::4], 0), np.delete(kept(some, scaled), np.s_[1::4], 0)
    )
    if isinstance(scaled.scaling, Block | Rank1):
        np.testing.assert_array_equal(got[1::4], 0.0)


def awkward():
    """Rows in which most numbers are far below the largest; subnormal nowhere when read back."""
    rng = np.random.default_rng(0)
    first = np.arange(SHAPE[1]) % 64 == 5
    rows = [
        np.where(first, 1.0, 1e-6),
        np.where(first, 1.0, 1e-30),
        np.where(first, 1e30, 1e-3),
        np.exp2(rng.uniform(-90, 20, SHAPE[1])),
        1e-25 * rng.chisquare(1, SHAPE[1]) + 1e-33,
    ]
    return np.resize(rows, SHAPE).astype(np.float32)


@pytest.mark.parametrize(("rounding", "domain"), [("nearest", "linear"), ("stochastic", "sqrt")])
def test_what_is_positive_never_becomes_zero(narrow, rounding, domain):
    held = Storage(narrow.format, narrow.scaling, rounding, domain).without_zero()
    assert (kept(awkward(), held) > 0).all()


def test_the_recipes_second_moments_have_no_zero():
    for name in ("bf16", "fp8", "fp4", "int8", "int4"):
        first, second = storage(name)
        assert first.format.zero
        assert not second.format.zero
        assert (kept(awkward(), second) > 0).all()
        assert (kept(np.zeros(SHAPE), second) == 0).all()


@pytest.mark.parametrize(
    ("format", "smallest"),
    [
        pytest.param(E4M3, 2.0**-9 / 448, id="e4m3"),
        pytest.param(E2M1, 0.5 / 6, id="e2m1"),
        pytest.param(UE2M2, 0.25 / 7, id="ue2m2"),
        pytest.param(UDYNAMIC8, 3.25e-7, id="udynamic8"),
        pytest.param(ULINEAR4, 1 / 16, id="ulinear4"),
    ],
)
@roundings
def test_it_becomes_the_smallest_number(format, smallest, rounding):
    x = np.full(SHAPE, smallest / 100, np.float32)
    x[:, ::128] = 1.0
    got = kept(x, Storage(format, Block(128), rounding).without_zero())
    np.testing.assert_allclose(got[x < 1], smallest, rtol=1e-6)


def test_above_the_smallest_number_nothing_changes(scaled):
    rng = np.random.default_rng(0)
    x = (0.3 + rng.random(SHAPE)).astype(np.float32)
    np.testing.assert_array_equal(kept(x, scaled), kept(x, scaled.without_zero()))
