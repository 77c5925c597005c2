"""Two 4-bit codes a byte: where each lies, how many bytes there are, and that nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qstate.numerics import (
    DYNAMIC4,
    E2M1,
    E4M3,
    UE2M2,
    ULINEAR4,
    Block,
    PerTensor,
    Rank1,
    Storage,
    decode,
    encode,
    unpacked,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))
unpacked_jit = jax.jit(unpacked, static_argnums=(1, 2))

FOUR_BITS = [E2M1, UE2M2, DYNAMIC4, ULINEAR4]


def linear(codes):
    """Numbers that `ULINEAR4` without a scale stores as the given codes."""
    return jnp.asarray((np.asarray(codes) + 1) / 16, jnp.float32)


def packed_oracle(codes, axis, length):
    """Halves of a block share bytes; a block that is not full packs as the shorter block it is."""
    codes = np.moveaxis(codes, axis, 0)
    parts = []
    for start in range(0, len(codes), length):
        block = codes[start : start + length]
        half = -(-len(block) // 2)
        high = np.zeros_like(block[:half])
        high[: len(block) - half] = block[half:]
        parts.append(block[:half] | high << 4)
    return np.moveaxis(np.concatenate(parts), 0, axis)


@pytest.mark.parametrize("format", FOUR_BITS, ids=str)
def test_every_byte_comes_back(format):
    packed = jnp.arange(256, dtype=jnp.uint8)
    storage = Storage(format, Block(128))
    shape = (512,)
    codes = np.asarray(unpacked_jit(packed, storage, shape))
    # 64 bytes a block: their low halves, then their high ones.
    want = np.arange(256).reshape(4, 1, 64) >> np.array([0, 4]).reshape(1, 2, 1) & 15
    np.testing.assert_array_equal(codes, want.reshape(-1))
    x = decode_jit(packed, jnp.ones(4, jnp.float32), storage, shape)
    again, scales = encode_jit(x, storage)
    assert again.dtype == jnp.uint8
    np.testing.assert_array_equal(decode_jit(again, scales, storage, shape), x)
    if format is ULINEAR4:  # the others have a block without their largest number
        x = linear(codes)
        np.testing.assert_array_equal(encode_jit(x, Storage(format))[0], packed)


@pytest.mark.parametrize(
    ("shape", "axis", "length", "bytes"),
    [
        ((1,), 0, 1, 1),
        ((7,), 0, 7, 4),
        ((127,), 0, 127, 64),
        ((128,), 0, 128, 64),
        ((129,), 0, 128, 65),
        ((257,), 0, 128, 129),
        ((1024,), 0, 128, 512),
        ((4096, 16), 0, 8, 32768),
        ((512, 3, 3, 3), 0, 4, 6912),
        ((5,), 0, 5, 3),
        ((3, 5, 64), 1, 2, 3 * 3 * 64),
        ((16, 200), 1, 128, 16 * 100),
        ((4, 129), 1, 128, 4 * 65),
        ((7, 65), 1, 65, 7 * 33),
        ((100, 3), 0, 42, 150),
    ],
    ids=str,
)
def test_codes_come_back_at_every_size(shape, axis, length, bytes):
    codes = np.random.default_rng(0).integers(0, 16, shape).astype(np.uint8)
    codes.reshape(-1)[0] = 15
    storage = Storage(ULINEAR4)
    packed, scales = encode_jit(linear(codes), storage)
    assert packed.nbytes == bytes
    np.testing.assert_array_equal(packed, packed_oracle(codes, axis, length))
    np.testing.assert_array_equal(decode_jit(packed, scales, storage, shape), linear(codes))
    for scaling in (Block(128), PerTensor(), Rank1()):
        storage = Storage(ULINEAR4, scaling)
        other, _ = jax.eval_shape(lambda x, s=storage: encode(x, s), linear(codes))
        assert other.shape == packed.shape


def test_the_halves_of_a_block_and_not_pairs_share_bytes():
    codes = np.array([1, 2, 3, 4, 15, 6, 7])
    packed, _ = encode_jit(linear(codes), Storage(ULINEAR4))
    assert packed.tolist() == [1 | 15 << 4, 2 | 6 << 4, 3 | 7 << 4, 4]


def test_wider_codes_are_not_packed():
    codes, _ = encode_jit(jnp.ones((4, 129)), Storage(E4M3, Block(128)))
    assert codes.shape == (4, 129)
    np.testing.assert_array_equal(unpacked(codes, Storage(E4M3, Block(128)), (4, 129)), codes)


def test_packing_under_jit_is_the_same():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 300)), jnp.float32)
    for format in FOUR_BITS:
        storage = Storage(format, Block(128))
        codes, scales = encode(x, storage)
        jitted, jitted_scales = encode_jit(x, storage)
        np.testing.assert_array_equal(codes, jitted)
        np.testing.assert_array_equal(scales, jitted_scales)
