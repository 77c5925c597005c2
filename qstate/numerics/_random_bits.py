"""Random bits from a counter: a hash of (key, index of the element in the whole array).

Every element's bits depend on nothing but the key and its place in the global array, so they are
the same on every device, for every sharding and in every implementation. The place enters as row
and column, hashed apart: no index needs 64 bits, and a kernel mixes one word an element.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def key_words(key) -> jax.Array:
    """Two uint32 words of a JAX key (typed or raw) or of an integer seed.

    Args:
      key: ``jax.random.key``, ``jax.random.PRNGKey``, raw uint32 data of 2 or more words, or an
        integer (Python's, NumPy's or a traced scalar).

    Returns:
      uint32[2].

    Raises:
      TypeError: for anything else.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if isinstance(key, int | np.integer):
        key = int(key)
        return jnp.array([key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF], jnp.uint32)
    if isinstance(key, jax.Array | np.ndarray):
        key = jnp.asarray(key)
        if key.ndim == 0 and jnp.issubdtype(key.dtype, jnp.integer):
            return jnp.stack([jnp.uint32(0), key.astype(jnp.uint32)])
        if key.ndim == 1 and key.shape[0] >= 2 and key.dtype == jnp.uint32:
            return jnp.array(key[-2:], copy=True)  # or donating the state would delete it
    raise TypeError(f"a key is an integer, jax.random.key(...) or raw uint32[2] data; got {key!r}")


def split_key(words: jax.Array, leaves: int) -> tuple[jax.Array, jax.Array]:
    """The next step's key, uint32[2], and a key a leaf for this one, uint32[leaves, 2]."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    later, now = jax.random.split(key)
    return jax.random.key_data(later), jax.random.bits(now, (leaves, 2), jnp.uint32)


def random_bits(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for every element.

    Args:
      words: uint32[2], a leaf's key.
      shape: shape of the whole array, not of a shard.

    Returns:
      uint32 of ``shape``.
    """
    columns = shape[-1] if shape else 1
    rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)
    row_seed, column_seed = place_seeds(words)
    row = place_words(row_seed, rows).reshape(*shape[:-1], 1)
    column = place_words(column_seed, jnp.arange(columns, dtype=jnp.uint32))
    return element_bits(row, column).reshape(shape)


def place_seeds(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Seeds of rows and of columns, uint32[] each, of a leaf's key."""
    # Small seeds too have to give rows and columns unlike words, so the key is mixed first.
    first = _mix(words[0] + jnp.uint32(0x9E3779B9))
    second = _mix(first ^ (words[1] + jnp.uint32(0x85EBCA6B)))
    return _mix(first + second), second


def place_words(seed: jax.Array, places: jax.Array) -> jax.Array:
    """A random word for every row or column, by its number in the whole array (uint32)."""
    return _mix(places ^ seed)


def element_bits(row: jax.Array, column: jax.Array) -> jax.Array:
    """32 random bits of the elements where rows and columns meet."""
    # The words of all rows and columns are random already; what is left to break is the sum.
    bits = row + column
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x2C1B3C6D)
    return bits ^ (bits >> 16)


def half_word(word: jax.Array, j: int) -> jax.Array:
    """16 random bits for average ``j``: the upper or the lower ones of a word."""
    return word & jnp.uint32(0xFFFF) if j % 2 else word >> 16


def _mix(word: jax.Array) -> jax.Array:
    # Chris Wellons' lowbias32, https://github.com/skeeto/hash-prospector
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)
