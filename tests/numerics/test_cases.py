"""Small inputs that made packages of this kind fail, each with what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qstate.numerics import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    INT8,
    UE2M2,
    UE4M4,
    ULINEAR4,
    Block,
    Codebook,
    NoScale,
    Storage,
    decode,
    encode,
    encode_unpacked,
    storage,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))
SCALES = ["float32", "bfloat16", "power_of_two"]


def kept(x, storage, key=0, encode=encode_jit, decode=decode_jit):
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(decode(*encode(x, storage, key), storage, x.shape))


def test_e4m3_saturates():
    x = [448, 464, 465, 1000, -1e30]
    assert kept(x, Storage(E4M3)).tolist() == [448, 448, 448, 448, -448]
    assert kept(x, Storage(E4M3, rounding="stochastic")).tolist() == [448, 448, 448, 448, -448]


def test_e5m2_saturates_and_keeps_its_subnormals():
    got = kept([61440, 65504, 2.0**-16, -0.0], Storage(E5M2))
    assert got.tolist() == [57344, 57344, 2.0**-16, 0.0]
    assert np.signbit(got[3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("format", [E2M1, INT8, UE2M2, DYNAMIC8], ids=str)
def test_a_fault_is_not_erased(format, bad):
    x = np.ones(384, np.float32)
    x[130] = bad
    got = kept(x, Storage(format, Block(128)))
    assert np.isnan(got[128:256]).all()
    np.testing.assert_array_equal(got[:128], 1.0)
    np.testing.assert_array_equal(got[256:], 1.0)
    assert np.isnan(kept(x, Storage(format))).all()


@pytest.mark.parametrize("scale", SCALES)
def test_zeros_are_no_division_by_zero(scale):
    np.testing.assert_array_equal(kept(np.zeros(128), Storage(E4M3, Block(128, scale))), 0.0)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("x", [1e-36, 2e-38, 1.2e-38], ids=str)
def test_tiny_blocks_keep_their_precision(x, scale, jit):
    functions = (encode_jit, decode_jit) if jit else (encode, decode)
    for format in (E4M3, UE4M4, INT8):
        x = np.full((40, 300), x)
        got = kept(x, Storage(format, Block(128, scale)), 0, *functions)
        np.testing.assert_allclose(got, x, rtol=2.0**-4)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("x", [1e-38, 1e-44], ids=str)
def test_blocks_below_float32s_normal_numbers_are_zero(x, scale, jit):
    functions = (encode_jit, decode_jit) if jit else (encode, decode)
    got = kept(np.full((40, 300), x), Storage(E4M3, Block(128, scale)), 0, *functions)
    np.testing.assert_array_equal(got, 0.0)


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp4", "int8", "int4"])
def test_second_moments_near_1e_17(name):
    v = 1e-17 * np.random.default_rng(0).uniform(0.5, 1, (32, 256))
    held = storage(name)[1]
    got = kept(v, held)
    gap = {"bf16": 2.0**-7, "fp8": 2.0**-3, "fp4": 2.0**-1, "int8": 2.0**-4, "int4": 2.0**-2}
    np.testing.assert_allclose(got, v, rtol=gap[name])


@pytest.mark.parametrize("scale", SCALES)
def test_first_moments_of_1e_8(scale):
    m = 1e-8 * np.random.default_rng(0).choice([-1, 1], 1024)
    np.testing.assert_allclose(kept(m, Storage(E4M3, Block(128, scale))), m, rtol=2.0**-4)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("format", [E4M3, E2M1], ids=str)
def test_infinity_in_one_block_of_many(format, scale):
    x = np.tile([1.0, 2.0, np.inf, 3.0] + 28 * [4.0], 32)
    x[128:] = np.where(np.isinf(x[128:]), 4.0, x[128:])
    got = kept(x, Storage(format, Block(128, scale)))
    assert np.isnan(got[:128]).all()
    np.testing.assert_allclose(got[128:], x[128:], rtol=1 / 4)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"f32"}))
def test_a_row_of_zeros_leaves_the_other_alone(name):
    x = np.zeros((2, 128), np.float32)
    x[1] = np.linspace(0.5, 1, 128)
    held = Storage(FORMATS[name], NoScale() if name == "bf16" else Block(128))
    got = kept(x, held)
    np.testing.assert_array_equal(got[0], 0.0)
    np.testing.assert_array_equal(got[1], kept(x[[1, 1]], held)[1])


@pytest.mark.parametrize("size", [1, 2, 7, 16, 127, 128, 129, 1024])
def test_sixteen_integers_packed(size):
    held = Storage(Codebook("int4", tuple(float(i) for i in range(-8, 8))))
    x = np.resize(np.arange(-8, 8), size)
    codes, scales = encode_jit(jnp.asarray(x, jnp.float32), held)
    np.testing.assert_array_equal(decode_jit(codes, scales, held, (size,)), x)
    assert codes.nbytes == -(-size // 2)


@pytest.mark.parametrize("format", [E2M1, UE2M2, DYNAMIC4, ULINEAR4], ids=str)
def test_bytes_of_1024_elements_at_4_bits(format):
    stored = encode_jit(jnp.ones(1024), Storage(format, Block(128)))
    assert [leaf.nbytes for leaf in jax.tree.leaves(stored)] == [512, 8 * 4]


def mean_and_count(x, held, count=2**20):
    got = kept(
        np.full((1024, count // 1024), x), held, np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)
    )
    return got.astype(np.float64).mean(), count


def test_stochastic_rounding_of_0_003_to_e4m3():
    mean, count = mean_and_count(0.003, Storage(E4M3, rounding="stochastic"))
    step, p = 2.0**-9, float(np.float32(0.003)) / 2.0**-9 % 1
    assert abs(mean - float(np.float32(0.003))) < 4 * step * np.sqrt(p * (1 - p) / count)


def test_a_two_thousandth_of_a_step():
    x = np.float32(1 + 0.0005 * 2.0**-3)
    mean, count = mean_and_count(x, Storage(E4M3, rounding="stochastic"))
    p = (float(x) - 1) / 2.0**-3
    assert mean > 1
    assert abs(mean - float(x)) < 4 * 2.0**-3 * np.sqrt(p * (1 - p) / count)


def test_what_bf16_makes_of_the_ends_of_float32_for_every_draw():
    draws = np.arange(2**16, dtype=np.uint32)
    held = Storage(BF16, NoScale(), "stochastic")
    ends = np.array([0x7F800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32)
    x = np.repeat(ends.view(np.float32)[:, None], len(draws), 1)
    bits = np.broadcast_to(draws, x.shape)
    codes, _ = jax.jit(encode_unpacked, static_argnums=1)(x, held, bits)
    got = np.asarray(decode_jit(codes, None, held, x.shape))
    assert np.isnan(got[:2]).all()
    assert (got[2] == np.inf).all()
    assert (got[3] == -np.inf).all()
    assert (got[4] == float(jnp.finfo(jnp.bfloat16).max)).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_narrow_cast_is_not_dropped_under_jit(rounding):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    held = Storage(BF16, NoScale(), rounding)
    together = jax.jit(lambda x: decode(*encode(x, held, 0), held, x.shape))(x)
    np.testing.assert_array_equal(together, kept(x, held))
    assert (np.asarray(together) != np.asarray(x)).mean() > 0.9
