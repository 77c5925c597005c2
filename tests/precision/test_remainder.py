"""A float32 number as a 16-bit one and a remainder: what is kept of it, bit by bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qstate.precision import join, split

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
KINDS = [(BF16, 16), (BF16, 8), (F16, 16), (F16, 8)]
IDS = [f"{dtype}-{bits}" for dtype, bits in KINDS]
split_jit, join_jit = jax.jit(split, static_argnums=(1, 2)), jax.jit(join)

# About both ends, about half a step of either format, and about half a step of 8 bits.
LOW = [0, 1, 2, 0x3F, 0x40, 0x41, 0x7F, 0x80, 0x81, 0xFF, 0x180, 0xFFF, 0x1000, 0x1001, 0x3FFF]
LOW += [0x4000, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0x8081, 0xEFFF]
LOW += [0xF000, 0xF001, 0xFF7F, 0xFF80, 0xFF81, 0xFFFF]

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")


@pytest.fixture(scope="module")
def x():
    """Every bfloat16, of either sign, with 48 lower halves behind it: 3 million float32."""
    low = np.concatenate([LOW, np.random.default_rng(0).integers(0, 2**16, 16)])
    bits = (np.arange(2**16)[:, None] << 16 | low).astype(np.uint32)
    return bits.reshape(-1).view(np.float32)


@pytest.fixture(scope="module", params=KINDS, ids=IDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def halves(x, kind):
    return _split(x, *kind)


def _split(x, dtype, bits):
    param, remainder = split_jit(x, dtype, bits)
    return np.asarray(param), np.asarray(remainder)


def _bits(x):
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def _joined(param, remainder):
    return np.asarray(join_jit(param, remainder))


def test_16_bits_beside_bfloat16_hold_float32(x):
    numbers = x[~np.isnan(x)]
    joined = _joined(*_split(numbers, BF16, 16))
    np.testing.assert_array_equal(_bits(joined), _bits(numbers))


def test_beside_16_bits_bfloat16_is_the_cast_but_for_ties_to_even(x):
    numbers = x[~np.isnan(x)]
    code = _bits(_split(numbers, BF16, 16)[0])
    cast = _bits(numbers.astype(BF16))
    bits = _bits(numbers)
    tie_above_even = (bits & 0xFFFF == 0x8000) & (bits >> 16 & 1 == 0)
    assert tie_above_even.sum() == 2 * (0x7F80 // 2)
    np.testing.assert_array_equal(code, cast + tie_above_even)


def test_nan_stays_nan(x, kind, halves):
    nan = np.isnan(x)
    assert nan.sum() > 10**4
    param, remainder = halves
    assert np.isnan(param[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(np.isnan(_joined(param, remainder)), nan)


def test_zeros_keep_their_sign_and_have_no_remainder(kind):
    zeros = np.array([0.0, -0.0], np.float32)
    param, remainder = _split(zeros, *kind)
    np.testing.assert_array_equal(_bits(param), [0, 0x8000])
    np.testing.assert_array_equal(remainder, [0, 0])
    np.testing.assert_array_equal(_bits(_joined(param, remainder)), _bits(zeros))


def test_what_is_finite_stays_finite_and_infinity_infinite(x, kind, halves):
    end = 65520 if kind[0] == F16 else np.inf
    joined = _joined(*halves)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.isinf(joined)[numbers], (np.abs(x) >= end)[numbers])
    np.testing.assert_array_equal(np.signbit(joined)[numbers], np.signbit(x)[numbers])


def test_no_half_is_infinite_that_the_cast_leaves_finite(x, kind, halves):
    cast = x.astype(kind[0]).astype(np.float32)
    half = halves[0].astype(np.float32)
    # Ties are cast away from zero beside 16 bits; this one is to even, and infinite, anyway.
    np.testing.assert_array_equal(np.isinf(half), np.isinf(cast))


@pytest.mark.parametrize(
    ("kind", "low", "high", "relative"),
    [
        pytest.param((BF16, 8), 2.0**-126, np.inf, 2.0**-16, id="bfloat16-8"),
        pytest.param((F16, 8), 2.0**-14, 65520, 2.0**-19, id="float16-8"),
        pytest.param((F16, 16), 2.0**-14, 65520, 0.0, id="float16-16"),
    ],
    indirect=["kind"],
)
def test_relative_error(x, kind, halves, low, high, relative):
    inside = (np.abs(x) >= low) & (np.abs(x) < high)
    wanted = x[inside].astype(np.float64)
    error = np.abs(_joined(*halves)[inside] - wanted)
    assert (error <= relative * np.abs(wanted)).all()
    assert (error > relative / 1.01 * np.abs(wanted)).any() == (relative > 0)


@pytest.mark.parametrize(
    ("kind", "end", "absolute"),
    [
        # Half of a last bit; a tie that is cast down to even may lose another one, or a sixteenth.
        pytest.param((BF16, 8), 2.0**-126, 2.0**-142, id="bfloat16-8"),
        pytest.param((F16, 8), 2.0**-14, 2.0**-33 + 2.0**-37, id="float16-8"),
        pytest.param((F16, 16), 2.0**-14, 2.0**-41 + 2.0**-40, id="float16-16"),
    ],
    indirect=["kind"],
)
def test_absolute_error_of_small_numbers(x, kind, halves, end, absolute):
    inside = np.abs(x) < end
    error = np.abs(_joined(*halves)[inside] - x[inside].astype(np.float64))
    assert absolute / 1.1 < error.max() <= absolute


@pytest.mark.parametrize("kind", [(F16, 16)], ids=["float16-16"], indirect=True)
def test_16_bits_beside_float16_hold_all_from_2_17_but_a_few_ties(x, kind, halves):
    """A tie is cast to even, and is its neighbour's pair where that is a float32 number, too."""
    inside = (np.abs(x) >= 2.0**-17) & (np.abs(x) < 65520)
    wanted = x[inside].astype(np.float64)
    steps = np.abs(wanted) * 2.0**24  # between float16's subnormals
    tie_above_even = (np.abs(wanted) < 2.0**-16) & (steps % 2 == 0.5)
    lost = np.where(tie_above_even, np.copysign(2.0**-40, wanted), 0)
    assert 0 < tie_above_even.sum() < 2**10
    np.testing.assert_array_equal(_joined(*halves)[inside], wanted - lost)


@pytest.mark.parametrize("kind", KINDS[1:], ids=IDS[1:], indirect=True)
def test_the_half_is_the_cast_of_what_is_joined(x, kind, halves):
    param, remainder = (half[~np.isnan(x)] for half in halves)
    cast = _joined(param, remainder).astype(kind[0])
    np.testing.assert_array_equal(_bits(param), _bits(cast))


def test_the_halves_of_what_is_joined_are_the_same(x, kind, halves):
    param, remainder = (half[~np.isnan(x)] for half in halves)
    again, remainder_again = _split(_joined(param, remainder), *kind)
    np.testing.assert_array_equal(_bits(again), _bits(param))
    np.testing.assert_array_equal(remainder_again, remainder)


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["positive", "negative"])
@pytest.mark.parametrize("kind", [(BF16, 8), (F16, 8), (BF16, 16)], ids=lambda k: f"{k[0]}-{k[1]}")
def test_every_pair_of_halves_is_that_of_what_it_joins_to(kind, sign):
    """All 16-bit numbers with all remainders that they can have (of 16 bits, with 256)."""
    dtype, bits = kind
    infinity = 0x7F80 if dtype == BF16 else 0x7C00
    code = np.arange(infinity + 1, dtype=np.uint16)[:, None]
    remainder = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), 2 ** (bits - 8) - (bits > 8))
    code, remainder = np.broadcast_arrays(code, remainder.astype(f"int{bits}"))
    # Below zero there is nothing, nor above infinity; what is cast to infinity may be finite
    # beside bfloat16, not beside float16.
    possible = (code > 0) | (remainder >= 0)
    possible &= (code < infinity) | ((remainder <= 0) if dtype == BF16 else (remainder == 0))
    param, remainder = (code[possible] | np.uint16(sign)).view(dtype), remainder[possible]
    joined = _joined(param, remainder)
    again, remainder_again = _split(joined, dtype, bits)
    np.testing.assert_array_equal(_bits(again), _bits(param))
    np.testing.assert_array_equal(remainder_again, remainder)
    magnitudes = np.abs(joined)
    assert (np.diff(magnitudes) > 0).all()  # and so no two pairs stand for one number


@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["+0", "-0"])
def test_a_remainder_beside_zero_may_be_of_the_other_sign(kind, zero):
    """No update leads from 0.0 to -0.0, where a weight that becomes negative is cast to."""
    dtype, bits = kind
    remainder = np.arange(1, 2 ** (bits - 1), dtype=f"int{bits}")
    param = np.full(remainder.shape, zero, dtype)
    one, other = (_joined(param, r) for r in (remainder, -remainder))
    assert (np.signbit(one) == np.signbit(zero)).all()
    np.testing.assert_array_equal(_bits(other), _bits(-one))


def test_eager_equals_jitted(x, kind, halves):
    param, remainder = split(jnp.asarray(x), *kind)
    np.testing.assert_array_equal(_bits(np.asarray(param)), _bits(halves[0]))
    np.testing.assert_array_equal(remainder, halves[1])
    joined = join(param, remainder)
    np.testing.assert_array_equal(_bits(np.asarray(joined)), _bits(_joined(*halves)))


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 5, 2)], ids=str)
def test_shapes_and_dtypes(shape, kind):
    dtype, bits = kind
    param, remainder = split(jnp.full(shape, 0.1, jnp.float32), dtype, bits)
    assert (param.shape, param.dtype) == (shape, dtype)
    assert (remainder.shape, remainder.dtype) == (shape, np.dtype(f"int{bits}"))
    joined = join(param, remainder)
    assert (joined.shape, joined.dtype) == (shape, np.float32)
