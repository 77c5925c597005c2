"""A scale from what a tensor was before: what is remembered, and what that makes of the tensor."""

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
    F32,
    INT8,
    UE2M2,
    ULINEAR4,
    Block,
    Delayed,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    decode,
    encode,
)

encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))
LARGEST, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny
BAD = (np.nan, np.inf, -np.inf)


class Remembered:
    """The scale in use and the history of one tensor, in float64."""

    def __init__(self, history, margin):
        self.history, self.margin = [0.0] * history, margin

    def step(self, x):
        """What is stored beside the next tensor: the scale, then the history."""
        x = np.asarray(x, np.float64)
        if not np.isfinite(x).all():
            return [np.nan, *self.history]
        own = np.abs(x).max(initial=0.0)
        if own < TINY:
            self.history = [0.0] * len(self.history)
            return [0.0, *self.history]
        largest = max(self.history) or own
        self.history = [own, *self.history[:-1]]
        return [min(largest * 2.0**self.margin, float(LARGEST)), *self.history]


def stored_in_turn(tensors, storage, encode=encode_jit, key=0):
    """Codes and scales of tensors that are stored one after the other."""
    scales, stored = None, []
    for i, x in enumerate(tensors):
        codes, scales = encode(jnp.asarray(x, jnp.float32), storage, key + i, previous=scales)
        stored.append((codes, scales))
    return stored


def read_in_turn(tensors, storage, **how):
    return [
        np.asarray(decode_jit(*stored, storage, np.shape(x)))
        for x, stored in zip(tensors, stored_in_turn(tensors, storage, **how), strict=True)
    ]


def remembering(storage, *magnitudes):
    """Scales as if arrays of one axis with these magnitudes had been stored, the last one first."""
    scales = np.zeros(1 + storage.scaling.history, np.float32)
    scales[1 : 1 + len(magnitudes)] = magnitudes
    return scales


def eventful(shape, seed=0, turns=24):
    """Tensors whose magnitude wanders by a factor of 2^20, some of them zero, some bad."""
    rng = np.random.default_rng(seed)
    exponents = np.cumsum(rng.normal(size=turns) * 3)
    for turn, exponent in enumerate(exponents):
        x = np.asarray(rng.normal(size=shape) * 2.0**exponent, np.float32)
        if turn in (9, 17):
            x = np.zeros_like(x)
        elif turn in (3, 12, 13):
            x.reshape(-1)[-1:] = BAD[turn % 3]
        yield x


SHAPES = [(), (1,), (7,), (33, 130), (3, 5, 64), (2, 1, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("margin", [0, 1, 5])
@pytest.mark.parametrize("history", [1, 3, 16])
def test_what_is_remembered(history, margin, shape):
    tensors = list(eventful(shape))
    held = Storage(E4M3, Delayed(history, margin))
    remembered = Remembered(history, margin)
    for x, (codes, scales) in zip(tensors, stored_in_turn(tensors, held), strict=True):
        assert scales.dtype == jnp.float32
        assert scales.shape == (1,) * (max(x.ndim, 1) - 1) + (1 + history,)
        assert codes.shape == (shape or (1,))
        np.testing.assert_array_equal(np.ravel(scales), remembered.step(x))


@pytest.mark.parametrize("format", [E4M3, E5M2, E2M1, INT8, F16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (33, 130), (3, 5, 64)], ids=str)
def test_what_is_read_is_the_nearest_number_under_the_scale(format, shape, grid_of):
    grid, top = grid_of(format), grid_of(format).top
    tensors = list(eventful(shape))
    remembered, compared = Remembered(3, 1), 0
    got = read_in_turn(tensors, Storage(format, Delayed(3, 1)))
    for x, read in zip(tensors, got, strict=True):
        scale = remembered.step(x)[0]
        if not scale > 0:
            np.testing.assert_array_equal(read, np.full(shape, scale))
            continue
        y = x.astype(np.float64) / scale * top
        below, above = grid.nearest(y * (1 - 2.0**-20)), grid.nearest(y * (1 + 2.0**-20))
        far = below == above  # from any tie
        np.testing.assert_allclose(read[far], below[far] / top * scale, rtol=2.0**-22)
        compared += far.mean()
    assert compared > 0.8 * (len(tensors) - 5)


def test_a_tensor_that_grows_saturates_once():
    x = np.array([1.0, -0.25, 0.5], np.float32)
    got = read_in_turn([x, 8 * x, 8 * x], Storage(E4M3, Delayed(4)))
    assert got[0].tolist() == [1.0, -0.25, 0.5]
    assert got[1].tolist() == [1.0, -1.0, 1.0]
    assert got[2].tolist() == [8.0, -2.0, 4.0]


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_a_margin_is_the_growth_that_does_not_saturate(margin):
    held = Storage(E4M3, Delayed(4, margin))
    x = np.array([1.0, -1.0], np.float32)
    just, more = np.float32(2.0**margin), np.float32(2.0**margin * 1.25)
    np.testing.assert_array_equal(read_in_turn([x, just * x], held)[1], just * x)
    np.testing.assert_array_equal(read_in_turn([x, more * x], held)[1], just * x)


@pytest.mark.parametrize("history", [1, 2, 5])
def test_a_tensor_that_shrinks_keeps_its_scale_for_as_long_as_the_history(history):
    # 2^-10 is half of e4m3's smallest number under a scale of 448, and a tie: it reads as zero.
    held = Storage(E4M3, Delayed(history))
    large, small = np.array([448.0], np.float32), np.array([2.0**-10], np.float32)
    stored = stored_in_turn([large] + [small] * (history + 2), held)
    scales = [float(s[0]) for _, s in stored]
    assert scales == [448.0] * (1 + history) + [2.0**-10] * 2
    got = [float(decode_jit(*pair, held, (1,))[0]) for pair in stored]
    assert got == [448.0] + [0.0] * history + [2.0**-10] * 2


@pytest.mark.parametrize("format", [E4M3, E2M1, INT8, DYNAMIC8, ULINEAR4], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_first_time_it_is_a_scale_per_tensor(format, rounding):
    x = np.random.default_rng(0).normal(size=(40, 301)).astype(np.float32)
    codes, scales = encode_jit(x, Storage(format, Delayed(16), rounding), 1)
    expected, scale = encode_jit(x, Storage(format, PerTensor(), rounding), 1)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(scales[:, :2], np.repeat(scale, 2, axis=1))
    assert not np.any(scales[:, 2:])


@pytest.mark.parametrize("without", [False, True], ids=["zero", "without-zero"])
@pytest.mark.parametrize("format", [E4M3, E2M1, UE2M2, INT8, DYNAMIC8, ULINEAR4], ids=str)
def test_zeros_are_exact_and_clear_the_history(format, without):
    held = Storage(format, Delayed(3, 1), "stochastic")
    held = held.without_zero() if without else held
    x = np.full((2, 65), 100.0, np.float32)
    stored = stored_in_turn([x, 0 * x, x / 1024], held)
    assert not any(np.any(part) for part in stored[1])
    np.testing.assert_array_equal(decode_jit(*stored[1], held, x.shape), 0 * x)
    assert stored[2][1].ravel().tolist() == [200 / 1024, 100 / 1024, 0, 0]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("shape", [(5,), (300, 400)], ids=str)
@pytest.mark.parametrize("format", [E4M3, E2M1, INT8], ids=str)
def test_bad_numbers_are_not_remembered(format, shape, bad):
    held = Storage(format, Delayed(3))
    good = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    spoilt = 1000 * good
    spoilt.reshape(-1)[3] = bad
    stored = stored_in_turn([good, spoilt, good, good / 2], held)
    assert np.isnan(decode_jit(*stored[1], held, shape)).all()
    np.testing.assert_array_equal(stored[1][1][..., 1:], stored[0][1][..., 1:])
    np.testing.assert_array_equal(stored[2][0], stored[0][0])
    remembered = Remembered(3, 0)
    for x, (_, scales) in zip([good, spoilt, good, good / 2], stored, strict=True):
        np.testing.assert_array_equal(np.ravel(scales), remembered.step(x))


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_numbers_the_first_time(bad):
    held = Storage(E4M3, Delayed(2, 1))
    x = np.array([1.0, -3.0, 2.0], np.float32)
    stored = stored_in_turn([np.array([bad, 1.0, 2.0]), x], held)
    np.testing.assert_array_equal(stored[0][1], [np.nan, 0, 0])
    assert stored[1][1].tolist() == [6.0, 3.0, 0.0]
    np.testing.assert_allclose(decode_jit(*stored[1], held, (3,)), x, rtol=1 / 16)


@pytest.mark.parametrize("exponent", [-60, -8, 0, 40])
@pytest.mark.parametrize(
    ("format", "native"),
    [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)],
    ids=["e4m3", "e5m2"],
)
def test_codes_are_those_of_a_cast(format, native, exponent):
    """Under a scale of top times 2^k the grid is the format's own, times 2^k."""
    held = Storage(format, Delayed(2))
    rng = np.random.default_rng(0)
    y = rng.normal(size=20000) * np.exp2(rng.uniform(-20, 18, 20000))
    x = (y * 2.0**exponent).astype(np.float32)
    scale = np.float32(format.top * 2.0**exponent)
    codes, scales = encode_jit(x, held, previous=remembering(held, scale / 4, scale))
    assert scales[0] == scale
    clipped = np.clip(x.astype(np.float64) * 2.0**-exponent, -format.top, format.top)
    cast = [(clipped * (1 + e)).astype(np.float32).astype(native) for e in (-(2.0**-20), 2.0**-20)]
    far = cast[0].view(np.uint8) == cast[1].view(np.uint8)  # from any tie
    far |= np.abs(clipped) == format.top  # a cast makes NaN or infinity of what is above
    expected = clipped.astype(np.float32).astype(native).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(codes)[far], expected[far])
    assert far.mean() > 0.999
    assert 0.001 < (np.abs(clipped) == format.top).mean() < 0.5


@pytest.mark.parametrize("domain", ["linear", "sqrt"])
@pytest.mark.parametrize("format", [E4M3, UE2M2, ULINEAR4], ids=str)
def test_stochastic_rounding_is_unbiased_below_the_scale(format, domain, grid_of):
    grid, count = grid_of(format), 2**17
    held = Storage(format, Delayed(3, 1), "stochastic", domain)
    scale = 6.0
    root = np.sqrt if domain == "sqrt" else np.asarray
    for x in np.float32([0.7, 2.9, 5.3]):
        codes, scales = encode_jit(
            np.full(count, x), held, 7, previous=remembering(held, root(1.0), root(scale) / 2)
        )
        np.testing.assert_allclose(scales[0], root(scale), rtol=1e-6)
        got = np.asarray(decode_jit(codes, scales, held, (count,)), np.float64)
        low, high, _ = grid.around(root(np.float64(x)) / float(scales[0]) * grid.top)
        low, high = (end / grid.top * float(scales[0]) for end in (low, high))
        low, high = (low**2, high**2) if domain == "sqrt" else (low, high)
        p = (x - low) / (high - low)
        assert 0.02 < p < 0.98
        error = 4 * (high - low) * np.sqrt(p * (1 - p) / count)
        assert abs(got.mean() - x) < error + 2.0**-17 * (high - low)
        np.testing.assert_allclose(np.unique(got), [low, high], rtol=1e-6)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("domain", ["linear", "sqrt"])
@pytest.mark.parametrize(
    "format", [E4M3, E5M2, F16, E2M1, UE2M2, INT8, DYNAMIC8, ULINEAR4], ids=str
)
def test_what_is_above_the_scale_saturates(format, domain, rounding, grid_of):
    """Also where the quotient overflows: nothing finite becomes NaN or passes the scale."""
    held, grid = Storage(format, Delayed(2), rounding, domain), grid_of(format)
    for scale in np.float32([1, 1e-12, 4 * TINY]):
        for sign, end in ((1, 1.0), (-1, grid.bottom / grid.top)):
            x = sign * np.float32([3, 100, 1e10, LARGEST])
            codes, scales = encode_jit(x, held, 5, previous=remembering(held, scale))
            if sign < 0 and (domain == "sqrt" or not format.signed):
                end = 0.0  # nothing that the format can hold: all zero
                assert scales[0] == 0
            expected = end * np.float64(scale) ** (2 if domain == "sqrt" else 1)
            expected = expected if abs(expected) >= TINY else 0.0
            got = np.asarray(decode_jit(codes, scales, held, x.shape), np.float64)
            np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)], ids=str)
def test_an_empty_array(shape):
    held = Storage(E4M3, Delayed(3))
    codes, scales = encode_jit(jnp.zeros(shape), held)
    assert codes.size == 0
    assert scales.shape == (1,) * (len(shape) - 1) + (4,)
    assert not scales.any()
    assert decode_jit(codes, scales, held, shape).shape == shape


def test_a_scalar():
    got = read_in_turn([np.float32(-1.5), np.float32(-4.0)], Storage(E4M3, Delayed(2, 1)))
    assert [g.shape for g in got] == [(), ()]
    assert [float(g) for g in got] == [-1.5, -3.0]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_the_ends_of_float32(jit):
    held = Storage(E4M3, Delayed(2, 1))
    encode_one = encode_jit if jit else encode

    def scales(x, *seen):
        previous = remembering(held, *seen) if seen else None
        return np.asarray(encode_one(jnp.float32([x, 0]), held, previous=previous)[1]).tolist()

    assert scales(TINY) == [2 * TINY, TINY, 0]
    for below in (np.float32(TINY / 2), np.float32(1e-45)):
        assert scales(below) == [0, 0, 0]
        assert scales(below, 1.0, 2.0) == [0, 0, 0]
    assert scales(LARGEST) == [LARGEST, LARGEST, 0]
    assert scales(1.0, LARGEST) == [LARGEST, 1, LARGEST]
    assert scales(1.0, 1.5e38) == [np.float32(1.5e38) * 2, 1, np.float32(1.5e38)]


@pytest.mark.parametrize("margin", [127, 128, 253, 254, 255, 10**6])
def test_margins_up_to_any_are_finite(margin):
    held = Storage(E4M3, Delayed(1, margin))
    for x in np.float32([TINY, 1.0, LARGEST]):
        scale = encode_jit(np.array([x]), held)[1][0]
        assert scale == min(float(x) * 2.0 ** min(margin, 500), float(LARGEST))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", [E4M3, E2M1, DYNAMIC8], ids=str)
def test_jitted_is_eager(format, rounding):
    held = Storage(format, Delayed(3, 1), rounding)
    tensors = list(eventful((40, 301), turns=14))
    eager = stored_in_turn(tensors, held, encode)
    for (codes, scales), one in zip(stored_in_turn(tensors, held), eager, strict=True):
        assert np.asarray(codes).tobytes() == np.asarray(one[0]).tobytes()
        assert np.asarray(scales).tobytes() == np.asarray(one[1]).tobytes()
        read, expected = (d(codes, scales, held, (40, 301)) for d in (decode_jit, decode))
        assert np.asarray(read).tobytes() == np.asarray(expected).tobytes()


def test_numbers_stay_strictly_typed_and_32_bits_wide():
    held = Storage(E4M3, Delayed(3, 1), "stochastic")
    tensors = list(eventful((40, 33), turns=5))
    narrow = stored_in_turn(tensors, held)
    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        for (codes, scales), one in zip(stored_in_turn(tensors, held), narrow, strict=True):
            assert (codes.dtype, scales.dtype) == (jnp.uint8, jnp.float32)
            np.testing.assert_array_equal(codes, one[0])
            np.testing.assert_array_equal(scales, one[1])


@pytest.mark.parametrize(
    "held",
    [
        *(Storage(format) for format in (F32, BF16, INT8)),
        *(Storage(E4M3, s) for s in (PerTensor(), Rank1(), Block(128, "power_of_two"))),
    ],
    ids=str,
)
def test_other_scalings_do_not_look_at_what_was_stored(held):
    x = np.random.default_rng(0).uniform(1, 2, (40, 300)).astype(np.float32)
    expected = encode_jit(x, held, 0)
    for previous in (encode_jit(100 * x, held, 0)[1], jnp.ones((1, 17))):
        jax.tree.map(
            np.testing.assert_array_equal, encode_jit(x, held, 0, previous=previous), expected
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Delayed(0), "history must be an integer, 1 or more; got 0"),
        (lambda: Delayed(-3), "got -3"),
        (lambda: Delayed(16.0), "got 16.0"),
        (lambda: Delayed(True), "got True"),
        (lambda: Delayed("16"), "got '16'"),
        (lambda: Delayed(16, -1), "margin must be an integer, 0 or more; got -1"),
        (lambda: Delayed(16, 0.5), r"got 0\.5"),
        (lambda: Delayed(16, False), "got False"),
        (lambda: Storage(BF16, Delayed()), "NoScale"),
        (lambda: Storage(F32, Delayed()), "NoScale"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "previous",
    [jnp.zeros((1, 16)), jnp.zeros(17), jnp.zeros((40, 1)), jnp.zeros((1, 1, 17)), jnp.float32(1)],
    ids=lambda p: str(p.shape),
)
def test_scales_of_another_storage_are_refused(previous):
    with pytest.raises(ValueError, match=r"Delayed\(history=16, margin=0\).*\(1, 17\)"):
        encode(jnp.ones((40, 33)), Storage(E4M3, Delayed(16)), previous=previous)


def test_how_it_prints_and_what_has_to_agree():
    held = Storage(E4M3, Delayed(), "stochastic")
    assert str(held) == "e4m3, delayed over 16, stochastic"
    assert str(Storage(E5M2, Delayed(4, 2))) == "e5m2, delayed over 4 with margin 2, nearest"
    assert (held.layout, held.packed, held.has_scales) == ("e4m3_delayed16", False, True)
    assert Storage(E4M3, Delayed(16, 3), domain="sqrt").layout == "e4m3_delayed16_sqrt"
    assert Storage(E4M3, Delayed(8)).layout == "e4m3_delayed8"
    layouts = {Storage(E4M3, s).layout for s in (NoScale(), PerTensor(), Rank1(), Block())}
    assert layouts == {"e4m3", "e4m3_pertensor", "e4m3_rank1", "e4m3_block128_float32"}
