"""`encode` and `decode` as functions: dtypes, tracing, batching, strictness; custom formats."""

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
    F16,
    F32,
    UE2M2,
    ULINEAR4,
    Block,
    Codebook,
    Minifloat,
    NoScale,
    Rank1,
    Storage,
    decode,
    encode,
    encode_unpacked,
    key_words,
    random_bits,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))

FEW = [
    Storage(BF16),
    Storage(F16, Block(128)),
    Storage(E4M3, Block(128)),
    Storage(E4M3, Block(128, "power_of_two")),
    Storage(E2M1, Block(128, "bfloat16")),
    Storage(UE2M2, Block(128), domain="sqrt"),
    Storage(DYNAMIC8, Block(128)),
    Storage(ULINEAR4, Rank1()),
]
few = pytest.mark.parametrize("storage", FEW, ids=str)
roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


SHAPE = (40, 300)


def numbers(shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.uniform(-20, 20, (*shape[:-1], 1)))
    return jnp.asarray(x, jnp.float32)


def assert_same(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


@roundings
@few
def test_jitted_codes_are_the_eager_ones(storage, rounding):
    storage = dataclasses.replace(storage, rounding=rounding)
    x = numbers()
    assert_same(encode(x, storage, 3), encode_jit(x, storage, 3))


@few
def test_jitted_numbers_are_the_eager_ones(storage):
    stored = encode(numbers(), storage)
    eager, jitted = decode(*stored, storage, SHAPE), decode_jit(*stored, storage, SHAPE)
    assert_same(eager, jitted)


@roundings
@pytest.mark.parametrize("domain", ["linear", "sqrt"])
def test_strict_dtype_promotion(narrow, rounding, domain):
    storage = dataclasses.replace(narrow, rounding=rounding, domain=domain)
    with jax.numpy_dtype_promotion("strict"):
        for held in (storage, storage.without_zero()):
            read = jax.eval_shape(lambda x, h=held: decode(*encode(x, h, 0), h, SHAPE), numbers())
            assert (read.shape, read.dtype) == (SHAPE, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32], ids=str)
def test_any_dtype_is_taken_as_float32(dtype):
    x = np.resize([1.0, -2.0, 3.0], (40, 300))
    storage = Storage(E4M3, Block(128))
    assert_same(encode(jnp.asarray(x, dtype), storage), encode(x.tolist(), storage))


@few
def test_codes_and_scales_keep_the_rank(storage):
    for shape in [(7,), (6, 130), (3, 4, 5), (2, 3, 4, 129)]:
        codes, scales = jax.eval_shape(lambda x, s=storage: encode(x, s), jnp.ones(shape))
        for part in jax.tree.leaves((codes, scales)):
            assert part.ndim == len(shape)
        got = jax.eval_shape(lambda c, s, t=storage, n=shape: decode(c, s, t, n), codes, scales)
        assert (got.shape, got.dtype) == (shape, jnp.float32)
        assert codes.dtype == (jnp.bfloat16 if storage.format is BF16 else codes.dtype)


@pytest.mark.parametrize("storage", [FEW[0], FEW[2], FEW[3], FEW[4], FEW[7]], ids=str)
def test_under_vmap(storage):
    x = numbers((3, 40, 300))
    batched = jax.jit(jax.vmap(lambda x: encode(x, storage)))(x)
    read = jax.jit(jax.vmap(lambda c, s: decode(c, s, storage, SHAPE)))(*batched)
    for i in range(len(x)):
        one = encode(x[i], storage)
        assert_same(jax.tree.map(lambda a, i=i: a[i], batched), one)
        assert_same(read[i], decode(*one, storage, SHAPE))


@pytest.mark.parametrize("storage", FEW[2:8:2], ids=str)
def test_with_64_bit_numbers_enabled(storage):
    storage = dataclasses.replace(storage, rounding="stochastic")
    x = numbers()
    stored = encode_jit(x, storage, 3)
    with jax.enable_x64():
        wide = encode_jit(x, storage, 3)
        read = decode_jit(*wide, storage, x.shape)
    assert_same(wide, stored)
    assert_same(read, decode_jit(*stored, storage, x.shape))


def test_encode_draws_the_bits_of_its_key():
    storage = Storage(E4M3, Block(128), "stochastic")
    x = numbers()
    bits = random_bits(key_words(9), x.shape) >> 16
    assert_same(encode(x, storage, 9), encode_unpacked(x, storage, bits))
    assert_same(encode(x, storage, jax.random.key(9)), encode_unpacked(x, storage, bits))


def test_the_key_may_be_traced():
    storage = Storage(E4M3, Block(128), "stochastic")
    x = numbers()
    assert_same(encode(x, storage, 9), jax.jit(lambda k: encode(x, storage, k))(9))


def test_bf16_is_not_elided_under_jit():
    """XLA drops a cast to bfloat16 and back; what is stored must be what is read."""
    x = numbers()
    storage = Storage(BF16)
    jitted = jax.jit(lambda x: decode(*encode(x, storage), storage, x.shape))(x)
    np.testing.assert_array_equal(jitted, x.astype(jnp.bfloat16).astype(jnp.float32))
    assert (np.asarray(jitted) != np.asarray(x)).any()


def test_f32_as_a_root():
    x = jnp.asarray([0.0, 1.0, 2.0, 1e-20, 1e20], jnp.float32)
    storage = Storage(F32, domain="sqrt")
    codes, _ = encode(x, storage)
    np.testing.assert_allclose(codes, np.sqrt(np.asarray(x)), rtol=1e-6)
    np.testing.assert_allclose(decode(codes, None, storage, x.shape), x, rtol=1e-6)


def test_negative_numbers_as_roots_are_zero():
    x = jnp.asarray(np.resize([4.0, -4.0, -1e30], SHAPE), jnp.float32)
    for format in (E4M3, UE2M2, ULINEAR4):
        storage = Storage(format, Block(128), domain="sqrt")
        got = np.asarray(decode(*encode(x, storage), storage, SHAPE))
        np.testing.assert_allclose(got[x > 0], 4.0)
        assert (got[x < 0] <= 4.0 / 256 + 1e-9).all()  # the smallest number of the format


CUSTOM = [
    Minifloat("e3m2", 3, 2),
    Minifloat("e5m0", 5, 0),
    Minifloat("ue0m4", 0, 4, signed=False),
    Minifloat("e2m1b9", 2, 1, bias=9),
    Codebook("pair", (-1.0, 1.0)),
    Codebook("thirds", (0.25, 0.5, 0.75, 1.0)),
    Codebook("down", (-4.0, -1.0, 0.0, 0.5)),
    Codebook("wide", (0.0, 1e-30, 1e-3, 1.0)),
    Codebook("close", (-1.0, -0.999999, 0.999999, 1.0)),
    Codebook("steps", tuple(float(k) for k in range(-3, 5))),
]


@roundings
@pytest.mark.parametrize("scaling", [NoScale(), Block(128)], ids=str)
@pytest.mark.parametrize("format", CUSTOM, ids=str)
def test_custom_formats_round_to_neighbours(format, scaling, rounding):
    points = np.unique(format.grid())
    rng = np.random.default_rng(0)
    x = rng.uniform(points[0], points[-1], (40, 300)).astype(np.float32)
    x[:, ::128], x[:, 1::128] = format.top, points[0]
    storage = Storage(format, scaling, rounding)
    got = np.asarray(decode(*encode(x, storage, 0), storage, x.shape))
    i = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    low, high = points[i], points[i + 1]
    tolerance = 1e-5 * np.maximum(np.abs(low), np.abs(high))
    near_low, near_high = np.abs(got - low) <= tolerance, np.abs(got - high) <= tolerance
    assert (near_low | near_high).all()
    if rounding == "nearest":
        error, gap = np.abs(got - x), high - low
        assert (error <= gap / 2 + tolerance).all()
