"""Which elements share a scale, and what is stored as one."""

import jax
import ml_dtypes
import numpy as np
import pytest

from qstate.numerics import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    INT8,
    UE4M4,
    ULINEAR4,
    Block,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    decode,
    encode,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))


def scales_of(x, storage, key=0):
    return encode_jit(np.asarray(x, np.float32), storage, key)[1]


def block_maxima(x, scale_shape, axis, length):
    """The largest magnitude of every block, element by element."""
    maxima = np.zeros(scale_shape, np.float32)
    place = list(np.indices(x.shape))
    place[axis] //= length
    place[axis + 1 :] = [np.zeros_like(p) for p in place[axis + 1 :]]
    np.maximum.at(maxima, tuple(place), np.abs(x))
    return maxima


# What is cut, into what lengths: the last axis, unless two of its rows fit into a block.
@pytest.mark.parametrize(
    ("shape", "size", "axis", "length", "scale_shape"),
    [
        ((16, 4096), 128, 1, 128, (16, 32)),
        ((4096, 16), 128, 0, 8, (512, 1)),
        ((512, 3, 3, 3), 128, 0, 4, (128, 1, 1, 1)),
        ((161, 1280), 128, 1, 128, (161, 10)),
        ((3, 5, 64), 128, 1, 2, (3, 3, 1)),
        ((3, 64), 128, 0, 2, (2, 1)),
        ((50, 65), 128, 1, 65, (50, 1)),
        ((2, 200), 128, 1, 128, (2, 2)),
        ((100, 3), 128, 0, 42, (3, 1)),
        ((100, 5, 1), 128, 0, 24, (5, 1, 1)),
        ((10, 100), 256, 0, 2, (5, 1)),
        ((2, 3, 4), 128, 0, 2, (1, 1, 1)),
        ((5,), 128, 0, 5, (1,)),
        ((129,), 128, 0, 128, (2,)),
        ((7,), 2, 0, 2, (4,)),
        ((4, 2), 2, 1, 2, (4, 1)),
        ((0, 3), 128, 0, 1, (0, 1)),
        ((1, 1, 1), 128, 0, 1, (1, 1, 1)),
    ],
    ids=str,
)
def test_block_maxima(shape, size, axis, length, scale_shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    storage = Storage(E4M3, Block(size))
    codes, scales = encode_jit(x, storage)
    assert codes.shape == shape
    assert scales.shape == scale_shape
    np.testing.assert_array_equal(scales, block_maxima(x, scale_shape, axis, length))
    assert jax.eval_shape(lambda c, s: decode(c, s, storage, shape), codes, scales).shape == shape


few = pytest.mark.parametrize(
    "storage",
    [Storage(E4M3), Storage(E4M3, Block(128)), Storage(E2M1, Block(128)), Storage(E4M3, Rank1())],
    ids=str,
)


@few
def test_a_scalar(storage):
    codes, scales = encode_jit(np.float32(-1.5), storage)
    got = decode_jit(codes, scales, storage, ())
    assert got.shape == ()
    assert got == -1.5


@few
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_an_empty_array(storage, shape):
    codes, scales = encode_jit(np.zeros(shape, np.float32), storage)
    assert codes.size == 0
    assert decode_jit(codes, scales, storage, shape).shape == shape


@pytest.mark.parametrize(
    ("scaling", "bytes_a_scale"),
    [(Block(128), 4), (Block(128, "bfloat16"), 2), (Block(128, "power_of_two"), 1)],
    ids=str,
)
def test_bytes(scaling, bytes_a_scale):
    x = np.ones((64, 1024), np.float32)
    codes, scales = encode_jit(x, Storage(E4M3, scaling))
    assert codes.nbytes == x.size
    assert scales.nbytes == x.size // 128 * bytes_a_scale
    assert encode_jit(x, Storage(E2M1, scaling))[0].nbytes == x.size // 2


def test_no_scale_stores_one_only_where_nan_has_no_code():
    x = np.ones((4, 8), np.float32)
    assert scales_of(x, Storage(BF16)) is None
    assert scales_of(x, Storage(E4M3)) is None
    assert scales_of(x, Storage(INT8)).tolist() == [[1.0]]
    assert scales_of(x * 300, Storage(ULINEAR4)).tolist() == [[1.0]]


def test_per_tensor_and_rank_1():
    x = np.random.default_rng(0).normal(size=(6, 7, 8)).astype(np.float32)
    largest = np.abs(x)
    np.testing.assert_array_equal(scales_of(x, Storage(E4M3, PerTensor())), [[[largest.max()]]])
    scales = scales_of(x, Storage(E4M3, Rank1()))
    assert [s.shape for s in scales] == [(6, 1, 1), (1, 7, 1), (1, 1, 8)]
    for scale, axes in zip(scales, [(1, 2), (0, 2), (0, 1)], strict=True):
        np.testing.assert_array_equal(scale, largest.max(axes, keepdims=True))
    (scale,) = scales_of(x.reshape(-1), Storage(E4M3, Rank1()))
    np.testing.assert_array_equal(scale, [largest.max()])


def test_rank_1_reads_an_element_with_the_smallest_of_its_scales():
    x = np.array([[16.0, 0.5], [8.0, 1.0]], np.float32)
    storage = Storage(ULINEAR4, Rank1())
    codes, scales = encode_jit(x, storage)
    assert [s.ravel().tolist() for s in scales] == [[16.0, 8.0], [16.0, 1.0]]
    np.testing.assert_array_equal(decode_jit(codes, scales, storage, x.shape), x)


MAGNITUDES = np.exp2(np.random.default_rng(0).uniform(-120, 120, 512)).astype(np.float32)


def in_blocks_of_two(magnitudes):
    return np.stack([magnitudes, magnitudes / 2], 1).reshape(-1)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_bfloat16_scale_rounds_down_or_up(rounding):
    """Down under nearest, where the largest saturates; up under stochastic, which is unbiased."""
    x = in_blocks_of_two(MAGNITUDES)
    got = np.asarray(scales_of(x, Storage(E4M3, Block(2, "bfloat16"), rounding)))
    assert got.dtype == ml_dtypes.bfloat16
    bits = MAGNITUDES.view(np.uint32)
    up = bits + np.uint32(0xFFFF if rounding == "stochastic" else 0x100)
    np.testing.assert_array_equal(got.view(np.uint16), up >> 16)
    # Numbers that are bfloat16s already stay.
    exact = (bits & 0xFFFF0000).view(np.float32)
    got = scales_of(in_blocks_of_two(exact), Storage(E4M3, Block(2, "bfloat16"), rounding))
    np.testing.assert_array_equal(np.asarray(got, np.float32), exact)


@pytest.mark.parametrize("format", [E4M3, E2M1, UE4M4, INT8], ids=str)
def test_a_power_of_two_is_the_smallest_that_does_not_saturate(format):
    """Code 127 + e is 2^e times the power of two at or below the format's largest number."""
    storage = Storage(format, Block(2, "power_of_two"))
    magnitudes = np.concatenate([MAGNITUDES, np.exp2(np.arange(-100.0, 100)).astype(np.float32)])
    top_unit = 2.0 ** np.floor(np.log2(format.top))
    got = np.asarray(scales_of(in_blocks_of_two(magnitudes), storage))
    assert got.dtype == np.uint8
    exponent = np.ceil(np.log2(magnitudes.astype(np.float64) / format.top) - 1e-12)
    # One less where rounding down left numbers that fit on the next finer grid.
    unit = np.exp2(got.astype(np.float64) - 127) / top_unit
    assert (magnitudes <= format.top * unit * (1 + 2.0 ** -(np.log2(1 / format.epsilon) + 1))).all()
    settled = got - (exponent + np.log2(top_unit) + 127)
    assert set(np.unique(settled)) <= {-1.0, 0.0}
    assert (settled == 0).mean() > 0.7


@pytest.mark.parametrize("format", [DYNAMIC8, DYNAMIC4], ids=str)
def test_a_map_that_reaches_further_up_than_down_saturates_at_neither_end(format):
    storage = Storage(format, Block(2))
    for largest, end in ((3.0, format.top), (-3.0, format.bottom)):
        codes, scales = encode_jit(np.array([0.1, largest], np.float32), storage)
        assert scales[0] == pytest.approx(largest / end, rel=2.0**-15)
        got = decode_jit(codes, scales, storage, (2,))
        np.testing.assert_allclose(got[1], largest, rtol=2.0**-15)


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "power_of_two"])
def test_scales_at_the_ends_of_float32(scale):
    storage = Storage(E4M3, Block(2, scale))
    smallest = np.finfo(np.float32).tiny
    for x, zero in ((smallest, False), (np.float32(smallest / 2), True), (np.float32(1e-45), True)):
        stored = np.asarray(scales_of([x, 0.0], storage)).astype(np.float32)
        assert (stored == 0).all() == zero
    stored = np.asarray(scales_of([np.finfo(np.float32).max, 0.0], storage)).astype(np.float32)
    assert np.isfinite(stored).all()
    assert (stored > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Block(0), "even number", id="zero"),
        pytest.param(lambda: Block(127), "even number", id="odd"),
        pytest.param(lambda: Block(128.0), "even number", id="float"),
        pytest.param(lambda: Block(128, "float16"), "scale must be one of", id="scale"),
        pytest.param(lambda: Storage(BF16, Block(128)), "NoScale", id="bf16"),
        pytest.param(lambda: Storage(DYNAMIC8, Block(128, "power_of_two")), "codebook", id="map"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scalings_are_values():
    assert Block() == Block(128, "float32") != Block(256)
    assert len({NoScale(), NoScale(), PerTensor(), Rank1(), Block(), Block(128)}) == 4
