"""The random bits: fair, independent along rows, columns, leaves and steps; and their keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qstate.numerics import key_words, random_bits, split_key

draw = jax.jit(random_bits, static_argnums=1)
SHAPE = (2048, 1024)
COUNT = SHAPE[0] * SHAPE[1]
WORDS = np.random.default_rng(7).integers(0, 2**32, (6, 2), dtype=np.uint32)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["first-key", "second-key", "third-key"])
def bits(request):
    return np.asarray(draw(WORDS[request.param], SHAPE))


def halves(bits):
    """The 16 bits of the first average and of the second, as numbers of mean 0 and variance 1."""
    for half in (bits >> 16, bits & 0xFFFF):
        yield ((half + 0.5) / 2**16 - 0.5) * np.sqrt(12)


def test_mean_and_variance(bits):
    for x in halves(bits):
        assert abs(x.mean()) < 4 / np.sqrt(COUNT)
        # The variance of a uniform number's square is 4/5 of its mean's.
        assert abs((x**2).mean() - 1) < 4 * np.sqrt(0.8 / COUNT)


def test_every_bit_is_set_half_of_the_time(bits):
    for place in range(32):
        share = ((bits >> place) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(COUNT)


def test_all_16_bit_numbers_are_equally_frequent(bits):
    for half in (bits >> 16, bits & 0xFFFF):
        counts = np.bincount(half.reshape(-1), minlength=2**16)
        expected = COUNT / 2**16
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - 2**16) < 5 * np.sqrt(2 * 2**16)


@pytest.mark.parametrize("axis", [0, 1], ids=["down-columns", "along-rows"])
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 128, 256, 511])
def test_no_serial_correlation(bits, axis, lag):
    for x in halves(bits):
        x = np.moveaxis(x, axis, 0)
        products = x[lag:] * x[:-lag]
        assert abs(products.mean()) < 5 / np.sqrt(products.size)


def test_rows_and_columns_are_not_correlated(bits):
    """All pairs of rows, and of columns: none stands out, nor are they too much alike together."""
    for x in halves(bits):
        for rows in (x[:512], x.T[:512]):
            count = rows.shape[1]
            r = (rows @ rows.T / count)[np.triu_indices(len(rows), 1)] * np.sqrt(count)
            assert np.abs(r).max() < 6.5
            assert abs((r**2).mean() - 1) < 5 * np.sqrt(2 / r.size)


def test_the_two_halves_are_not_correlated(bits):
    first, second = halves(bits)
    assert abs((first * second).mean()) < 4 / np.sqrt(COUNT)


def test_row_and_column_means_vary_as_they_should(bits):
    for x in halves(bits):
        for axis in (0, 1):
            means = x.mean(axis) * np.sqrt(x.shape[axis])
            assert abs((means**2).mean() - 1) < 5 * np.sqrt(2 / means.size)
            assert np.abs(means).max() < 5.5


@pytest.mark.parametrize("by", ["sum", "xor"])
def test_rows_and_columns_do_not_add_up(bits, by):
    """Where they did, three corners of a rectangle would tell the fourth.

    What tells it from what the others add up to is the same in no more rectangles than chance has
    it, and is nothing in particular.
    """
    rng = np.random.default_rng(0)
    count = 2**20
    top, left = (rng.integers(0, size, count) for size in SHAPE)
    bottom, right = (
        (first + rng.integers(1, size, count)) % size
        for first, size in zip((top, left), SHAPE, strict=True)
    )
    one, two = bits[top, left], bits[top, right]
    three, four = bits[bottom, left], bits[bottom, right]
    minors = one - two - three + four if by == "sum" else one ^ two ^ three ^ four
    assert count - len(np.unique(minors)) < 2 * count**2 / 2**33
    for half in (minors >> 16, minors & 0xFFFF):
        assert np.bincount(half).max() < 8 * count / 2**16


def test_a_vector_is_as_random():
    x = next(halves(np.asarray(draw(WORDS[2], (2**20,)))))
    assert abs(x.mean()) < 4 / 2**10
    for lag in (1, 2, 127, 128, 4096):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 / np.sqrt(x.size - lag)


def test_keys_give_different_bits():
    """As many equal 16-bit numbers as chance has it, at the same place and one further on."""
    several = np.stack([np.asarray(draw(w, SHAPE)) >> 16 for w in WORDS]).reshape(len(WORDS), -1)
    p = 2.0**-16
    bound = 5 * np.sqrt(p * (1 - p) / COUNT)
    for i in range(len(WORDS)):
        for j in range(i):
            for shift in (0, 1):
                equal = (several[i] == np.roll(several[j], shift)).mean()
                assert abs(equal - p) < bound


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_small_seeds_do_not_repeat_their_bits(seed):
    """Rows and columns must not have the same words: (r, c) would be as (c ^ seed, r ^ seed)."""
    assert len(np.unique(draw(key_words(seed), (256, 256)))) > 0.99 * 2**16


def test_seeds_give_other_bits_and_not_the_same_in_another_order():
    first, second = (np.asarray(draw(key_words(seed), (64, 128))) for seed in (0, 1))
    assert (first != second).any()
    assert (np.sort(first, axis=1) != np.sort(second, axis=1)).any()


def test_leaves_and_steps_have_keys_of_their_own():
    words = key_words(0)
    seen = []
    for _ in range(50):
        words, leaves = split_key(words, 20)
        assert words.shape == (2,)
        assert leaves.shape == (20, 2)
        assert words.dtype == leaves.dtype == jnp.uint32
        seen += [tuple(pair) for pair in np.asarray(leaves).tolist()]
        seen.append(tuple(np.asarray(words).tolist()))
    assert len(set(seen)) == len(seen)
    assert len({a for a, _ in seen}) == len({b for _, b in seen}) == len(seen)


def test_the_bits_depend_on_the_place_in_the_whole_array_alone():
    whole = np.asarray(draw(WORDS[0], (64, 96)))
    np.testing.assert_array_equal(draw(WORDS[0], (8, 96)), whole[:8])
    np.testing.assert_array_equal(draw(WORDS[0], (64, 32)), whole[:, :32])
    np.testing.assert_array_equal(draw(WORDS[0], (4, 16, 96)), whole.reshape(4, 16, 96))
    assert draw(WORDS[0], ()).shape == ()
    assert draw(WORDS[0], (0, 3)).shape == (0, 3)


def test_eager_and_jitted_bits_are_the_same():
    eager = random_bits(jnp.asarray(WORDS[0]), (16, 128))
    assert eager.dtype == jnp.uint32
    np.testing.assert_array_equal(eager, draw(WORDS[0], (16, 128)))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        pytest.param(5, [0, 5], id="int"),
        pytest.param(2**40 + 3, [256, 3], id="wide-int"),
        pytest.param(np.int32(5), [0, 5], id="numpy-int"),
        pytest.param(np.uint32(2**32 - 1), [0, 2**32 - 1], id="numpy-uint32"),
        pytest.param(np.array(5), [0, 5], id="numpy-scalar-array"),
        pytest.param(jnp.int32(5), [0, 5], id="jax-scalar"),
        pytest.param(np.array([7, 8], np.uint32), [7, 8], id="raw-2"),
        pytest.param(np.array([1, 2, 3, 4], np.uint32), [3, 4], id="raw-4"),
        pytest.param(jnp.array([7, 8], jnp.uint32), [7, 8], id="raw-jax"),
    ],
)
def test_key_words(key, words):
    got = key_words(key)
    assert got.dtype == jnp.uint32
    assert got.tolist() == words


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_key_words_of_jax_keys(impl):
    typed = jax.random.key(5, impl=impl)
    data = np.asarray(jax.random.key_data(typed))
    np.testing.assert_array_equal(key_words(typed), data[-2:])
    np.testing.assert_array_equal(key_words(jax.random.PRNGKey(5, impl=impl)), data[-2:])


def test_key_words_of_tracers():
    np.testing.assert_array_equal(jax.jit(key_words)(5), [0, 5])
    np.testing.assert_array_equal(jax.jit(key_words)(jnp.array([7, 8], jnp.uint32)), [7, 8])
    np.testing.assert_array_equal(jax.jit(key_words)(jax.random.key(5)), [0, 5])


@pytest.mark.parametrize("seed", [-1, 2**40 + 3], ids=str)
def test_a_numpy_seed_is_the_same_key_as_pythons(seed):
    np.testing.assert_array_equal(key_words(np.int64(seed)), key_words(seed))


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(1.5, id="float"),
        pytest.param("0", id="string"),
        pytest.param(None, id="none"),
        pytest.param([7, 8], id="list"),
        pytest.param(np.array([7, 8], np.int32), id="signed"),
        pytest.param(np.array([7], np.uint32), id="one-word"),
        pytest.param(np.zeros((3, 2), np.uint32), id="many-keys"),
        pytest.param(jnp.float32(1), id="jax-float"),
    ],
)
def test_what_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match="a key is an integer"):
        key_words(key)


def test_many_typed_keys_are_refused():
    with pytest.raises(TypeError, match="a key is an integer"):
        key_words(jax.random.split(jax.random.key(0), 3))


def draws(source):
    """2^24 words each from three keys, leaves of a step, or steps of a leaf."""
    if source == "keys":
        words = [key_words(seed) for seed in (0, 1, 2**40 + 3)]
    elif source == "leaves":
        words = split_key(key_words(0), 3)[1]
    else:
        key, words = key_words(0), []
        for _ in range(3):
            key, leaves = split_key(key, 5)
            words.append(leaves[2])
    return [np.asarray(draw(w, (4096, 4096))) for w in words]


@pytest.fixture(scope="module", params=["keys", "leaves", "steps"])
def many(request):
    return draws(request.param)


def centred(bits):
    """Both halves as float32 numbers of mean 0 and variance 1."""
    for half in (bits >> 16, bits & 0xFFFF):
        yield (half.astype(np.float32) + np.float32(0.5 - 2**15)) * np.float32(12**0.5 / 2**16)


def mean_product(one, other):
    """Of two arrays of numbers of variance 1, in standard deviations."""
    rows = np.einsum("ij,ij->i", one, other)
    return rows.sum(dtype=np.float64) / np.sqrt(one.size)


def test_many_draws_have_the_right_mean_variance_and_bits(many):
    for bits in many:
        count = bits.size
        for x in centred(bits):
            assert abs(x.sum(dtype=np.float64)) < 5 * np.sqrt(count)
            assert abs((x * x).sum(dtype=np.float64) - count) < 5 * np.sqrt(0.8 * count)
        for place in range(32):
            ones = np.count_nonzero(bits & np.uint32(1 << place))
            assert abs(ones - count / 2) < 5 * np.sqrt(count / 4)


def test_many_draws_are_not_correlated_with_their_neighbours(many):
    for bits in many:
        for x in centred(bits):
            for lag in (1, 2, 128, 1024):
                assert abs(mean_product(x[:, lag:], x[:, :-lag])) < 5
                assert abs(mean_product(x[lag:], x[:-lag])) < 5
            assert abs(mean_product(x[1:, 1:], x[:-1, :-1])) < 5


def test_many_draws_are_not_correlated_with_each_other(many):
    """Between keys, leaves and steps: in the same half or the other, in place or one further on."""
    halves = [x for bits in many for x in centred(bits)]
    for i, one in enumerate(halves):
        for other in halves[:i]:
            assert abs(mean_product(one, other)) < 5
            assert abs(mean_product(one[:, 1:], other[:, :-1])) < 5
            assert abs(mean_product(one[1:], other[:-1])) < 5
