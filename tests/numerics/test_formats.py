"""Every code of every format: what it stands for, and that it comes back."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qstate.numerics import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    F16,
    F32,
    FORMATS,
    Codebook,
    Minifloat,
    NoScale,
    Storage,
    decode,
    dynamic_map,
    encode,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))

in_ml_dtypes = pytest.mark.parametrize(
    ("format", "dtype"),
    [
        pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
        pytest.param(E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
        pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
        pytest.param(BF16, ml_dtypes.bfloat16, id="bf16"),
        pytest.param(F16, np.float16, id="f16"),
        pytest.param(Minifloat("e3m4", 3, 4, specials="ieee"), ml_dtypes.float8_e3m4, id="e3m4"),
        pytest.param(Minifloat("e4m3i", 4, 3, specials="ieee"), ml_dtypes.float8_e4m3, id="e4m3i"),
        pytest.param(Minifloat("e2m3", 2, 3), ml_dtypes.float6_e2m3fn, id="e2m3"),
        pytest.param(Minifloat("e3m2", 3, 2), ml_dtypes.float6_e3m2fn, id="e3m2"),
    ],
)


def every_code(format):
    """All codes as they are stored, and the scale of 1.0 that formats without NaN have."""
    count = 2**format.bits
    codes = np.arange(count)
    if format.bits == 4:  # one block of 16: its halves share bytes
        codes = codes[:8] | codes[8:] << 4
    codes = codes.astype(np.uint16 if format.bits == 16 else np.uint8)
    codes = jnp.asarray(codes.view(format.dtype))
    return codes, None if format.holds_nan else jnp.ones(1, jnp.float32), (count,)


def bits_of(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def test_every_code_decodes_to_its_number(format, grid_of):
    codes, scales, shape = every_code(format)
    got = np.asarray(decode_jit(codes, scales, Storage(format), shape))
    want = grid_of(format).by_code.astype(np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@in_ml_dtypes
def test_every_code_decodes_as_in_ml_dtypes(format, dtype):
    codes, scales, shape = every_code(format)
    got = np.asarray(decode_jit(codes, scales, Storage(format), shape))
    want = np.arange(2**format.bits).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    want = want.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(bits_of(got)[finite], bits_of(want)[finite])


@pytest.mark.parametrize("without", [False, True], ids=["zero", "without-zero"])
def test_every_code_comes_back(format, without):
    codes, scales, shape = every_code(format)
    storage = Storage(format)
    if without:
        storage = storage.without_zero()
    x = decode_jit(codes, scales, storage, shape)
    again, scales_again = encode_jit(x, storage)
    changed = bits_of(again) != bits_of(codes)
    if format.holds_nan:
        changed &= ~np.isnan(x)
        np.testing.assert_array_equal(
            np.isnan(decode_jit(again, None, storage, shape)), np.isnan(x)
        )
    if without and not format.holds_nan:
        # A tensor that is not all zero has no zeros: they round up to the smallest code.
        zeros = np.asarray(x) == 0
        changed = decode_jit(again, scales_again, storage, shape) != np.asarray(x)
        changed &= ~zeros
    assert not changed.any()


def test_the_grid_is_the_oracles(format, grid_of):
    grid = grid_of(format)
    np.testing.assert_array_equal(format.grid().astype(np.float32), grid.by_code.astype(np.float32))
    assert format.top == grid.top
    assert format.bottom == min(grid.bottom, 0)
    assert format.signed == (grid.bottom < 0)
    assert format.holds_nan == np.isnan(grid.by_code).any()


@pytest.mark.parametrize(
    ("name", "bits", "epsilon"),
    [
        ("f32", 32, 2**-23),
        ("bf16", 16, 2**-7),
        ("f16", 16, 2**-10),
        ("e4m3", 8, 2**-3),
        ("e5m2", 8, 2**-2),
        ("e2m1", 4, 2**-1),
        ("ue2m2", 4, 2**-2),
        ("ue4m4", 8, 2**-4),
        # Three over the codes in the three octaves below the top.
        ("int8", 8, 3 / 112),
        ("dynamic8", 8, 3 / 63),
        ("udynamic8", 8, 3 / 125),
        ("dynamic4", 4, 3 / 5),
        ("ulinear4", 4, 3 / 14),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bits_and_spacing(name, bits, epsilon):
    format = FORMATS[name]
    assert format.bits == bits
    assert format.dtype.itemsize == max(bits // 8, 1)
    assert format.epsilon == pytest.approx(epsilon, rel=1e-12)


def test_all_formats_are_named():
    names = "f32 bf16 f16 e4m3 e5m2 e2m1 ue2m2 ue4m4 int8 dynamic8 udynamic8 dynamic4 ulinear4"
    assert list(FORMATS) == names.split()
    assert all(name == format.name for name, format in FORMATS.items())
    assert len(set(FORMATS.values())) == len(FORMATS)  # hashable, and no two equal


def test_without_zero_is_another_format_of_the_same_grid(format):
    other = format.without_zero()
    assert other != format
    assert str(other) == f"{format.name} without zero"
    assert dataclasses.replace(other, zero=True) == format
    np.testing.assert_array_equal(other.grid(), format.grid())


def test_f32_is_kept_bit_for_bit():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    x = jnp.asarray(bits.view(np.float32))
    codes, scales = encode(x, Storage(F32))
    assert scales is None
    np.testing.assert_array_equal(bits_of(decode(codes, scales, Storage(F32), x.shape)), bits)


def test_dynamic_map_is_dettmers(grid_of):
    np.testing.assert_allclose(dynamic_map(7, 8, True), grid_of(FORMATS["dynamic8"]).points)
    np.testing.assert_allclose(dynamic_map(7, 8, False), grid_of(FORMATS["udynamic8"]).points)
    # Ends and middle of the table that bitsandbytes prints.
    signed = FORMATS["dynamic8"].values
    assert signed[0] == pytest.approx(-0.9929687)
    assert signed[126:130] == pytest.approx((-5.5e-7, 0.0, 5.5e-7, 3.25e-6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Minifloat("x", 9, 3), "exponent_bits", id="exponent"),
        pytest.param(lambda: Minifloat("x", -1, 3), "exponent_bits", id="negative-exponent"),
        pytest.param(lambda: Minifloat("x", 4, 24), "mantissa_bits", id="mantissa"),
        pytest.param(lambda: Minifloat("x", 4, 3, specials="fn"), "specials", id="specials"),
        pytest.param(lambda: Minifloat("x", 8, 10), "16 at most", id="bits"),
        pytest.param(lambda: Minifloat("x", 8, 7, bias=100), "127", id="bias"),
        pytest.param(lambda: Codebook("x", (0.0, 1.0, 2.0)), "power of two", id="three"),
        pytest.param(lambda: Codebook("x", (1.0,)), "2 to 256", id="one"),
        pytest.param(lambda: Codebook("x", tuple(range(512))), "2 to 256", id="many"),
        pytest.param(lambda: Codebook("x", (0.0, 1.0, 1.0, 2.0)), "rise", id="equal"),
    ],
)
def test_a_format_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_format_is_told_from_others_by_all_of_it():
    assert Codebook("c", (0.25, 1.0)) != Codebook("c", (0.5, 1.0))
    assert Minifloat("m", 3, 2) != Minifloat("m", 3, 2, signed=False)
    assert NoScale() == NoScale()
