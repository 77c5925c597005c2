"""Arrays to codes and scales, and back: the definition that every kernel has to equal bit for bit.

::

    u      = x                         (domain "sqrt": the square root of x)
    scale  = largest |u| of the block
    y      = u * (4 / scale) * (top / 4)
    index  = round(locate(y))          nearest, or stochastic from 16 random bits
    codes  = sign and index            packed two a byte below 5 bits

    decode = value(codes) / top * scale    (domain "sqrt": squared)

Reciprocals of 4, not of 1: ``4 / scale`` is a normal float32 for every normal scale (the smallest
counts as the next), so nothing is flushed to zero and nothing overflows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qstate.numerics._blocks import Blocks, block_layout
from qstate.numerics._format import Format
from qstate.numerics._minifloat import Minifloat
from qstate.numerics._packing import pack, unpack
from qstate.numerics._random_bits import key_words, random_bits
from qstate.numerics._rounding import RANDOM_BITS
from qstate.numerics._scale_formats import (
    narrow_scale,
    scale_number,
    store_scale,
    widen_scale,
)
from qstate.numerics._scaling import Block, NoScale
from qstate.numerics._storage import Storage

Scales = None | jax.Array | tuple[jax.Array, ...]

_LARGEST = np.finfo(np.float32).max
_LARGEST_ROOT = np.float32(2.0**64 * (1 - 2.0**-24))
_SMALLEST_SCALE = np.float32(2.0**-126 * (1 + 2.0**-23))  # 4 over it is finite
_ONE = 0x3F800000
_INFINITY = 0x7F800000


def encode(
    x: jax.Array, storage: Storage, key=None, *, previous: Scales = None
) -> tuple[jax.Array, Scales]:
    """Rounds an array to the grid of a storage.

    Args:
      x: numbers of any shape, taken as float32.
      storage: how they are held.
      key: for stochastic rounding, anything `jax.random` takes as a key, or an integer.
      previous: the scales that `encode` returned for what was stored before, which ``Delayed``
        scales by; None where nothing was. Other scalings do not look at it.

    Returns:
      ``codes``, an array of the same rank (4-bit codes: half as long along the blocks' axis), and
      ``scales``: one array of the same rank, a tuple of one an axis for ``Rank1``, or None.

    Raises:
      ValueError: if the rounding is stochastic and there is no key, or if ``previous`` is of
        another storage.

    Numerics:
      Computed in float32. Finite numbers saturate at the format's largest and never become NaN.
      NaN and infinity stay so where the format holds them, else their whole block reads back NaN.
      Blocks whose largest magnitude is below the smallest normal float32 are zero.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128))
      >>> codes, scales = qstate.numerics.encode(jnp.arange(1024.0), e4m3)
      >>> codes.nbytes, scales.nbytes
      (1024, 32)
    """
    x = jnp.asarray(x, jnp.float32)
    bits = None
    if storage.stochastic:
        if key is None:
            raise ValueError("stochastic rounding needs a key: encode(x, storage, key=0)")
        bits = random_bits(key_words(key), x.shape) >> (32 - RANDOM_BITS)
    codes, scales = encode_unpacked(x, storage, bits, previous)
    return packed(codes, storage, x.shape), scales


def decode(codes: jax.Array, scales: Scales, storage: Storage, shape: tuple[int, ...]) -> jax.Array:
    """What was stored, as numbers.

    Args:
      codes: what `encode` returned.
      scales: what `encode` returned.
      storage: the storage they were encoded with.
      shape: the shape of the array that was encoded.

    Returns:
      float32 of ``shape``.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> e2m1 = qstate.Storage(qstate.E2M1, qstate.Block(128))
      >>> codes, scales = qstate.numerics.encode(jnp.array([-6.0, 0.4, 3.1]), e2m1)
      >>> qstate.numerics.decode(codes, scales, e2m1, (3,)).tolist()
      [-6.0, 0.5, 3.0]
    """
    if storage.exact:
        return codes
    blocks = blocks_of(storage, shape)
    codes = storage.format.widen(unpack(codes, blocks) if storage.packed else blocks.split(codes))
    if storage.has_scales:
        numbers: Any = jax.tree.map(lambda s: scale_number(widen_scale(s)), scales)
        x = decode_scaled(codes, storage.scaling.spread(numbers, blocks), storage)
    else:
        x = decode_unscaled(codes, storage)
    return blocks.join(x).reshape(shape)


def blocks_of(storage: Storage, shape: tuple[int, ...]) -> Blocks:
    """How an array is worked on: in its scales' blocks, or in those that share bytes."""
    shape = shape or (1,)
    if storage.packed or isinstance(storage.scaling, Block):
        return block_layout(shape, storage.scaling.block)
    return Blocks(len(shape) - 1, max(shape[-1], 1), shape[-1], 0)


def unpacked(codes: jax.Array, storage: Storage, shape: tuple[int, ...]) -> jax.Array:
    """Codes with one array element each."""
    blocks = blocks_of(storage, shape)
    return blocks.join(unpack(codes, blocks)) if storage.packed else codes


def packed(codes: jax.Array, storage: Storage, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `unpacked`."""
    if not storage.packed:
        return codes
    blocks = blocks_of(storage, shape)
    return pack(blocks.split(codes), blocks)


def encode_unpacked(
    x: jax.Array, storage: Storage, bits: jax.Array | None, previous: Scales = None
) -> tuple[jax.Array, Scales]:
    """`encode` of a float32 array by given bits (uint32 below 2^16), an array element a code."""
    if storage.exact:
        return x, None
    blocks = blocks_of(storage, x.shape)
    x = blocks.split(x.reshape(x.shape or (1,)))
    bits = None if bits is None else blocks.split(bits.reshape(bits.shape or (1,)))
    if not storage.has_scales:
        return storage.format.narrow(blocks.join(encode_unscaled(x, storage, bits))), None
    measure = lambda parts: storage.scaling.measure(parts[0], blocks)  # noqa: E731
    (codes,), scales = encode_scaled(
        [x],
        storage,
        [bits],
        measured=measure(magnitudes([x], storage)),
        measure=measure,
        spread=lambda scales: storage.scaling.spread(scales, blocks),
        previous=previous,
    )
    scales = jax.tree.map(lambda wide: narrow_scale(wide, storage.scaling.scale), scales)
    return storage.format.narrow(blocks.join(codes)), scales


def encode_unscaled(x: jax.Array, storage: Storage, bits: jax.Array | None) -> jax.Array:
    """Codes (int32) of float32 numbers in a format that needs no scale, by given bits."""
    format = storage.format
    u = _square_root(x) if storage.domain == "sqrt" else x
    index = _round(u, storage, bits)
    if not format.zero:
        index = format.nonzero(index, (u != 0).astype(jnp.int32))
    index = jnp.where(jnp.isfinite(u), index, _special(format, u))
    return format.code(index, u)


def encode_scaled(
    parts: Sequence[jax.Array],
    storage: Storage,
    bits: Sequence[jax.Array | None],
    measured: Any,
    measure: Callable[[Sequence[jax.Array]], Any],
    spread: Callable[[Any], jax.Array],
    previous: Scales = None,
) -> tuple[list[jax.Array], Any]:
    """Codes (int32) of float32 numbers given in parts, and their scales (wide).

    Args:
      parts: the numbers; a block has elements in all of them.
      storage: how they are held.
      bits: random bits (uint32 below 2^16) for every part.
      measured: the largest of their `magnitudes` in every block, over all parts.
      measure: the same of other integers that are not negative.
      spread: scales (float32) in a shape that broadcasts against a part.
      previous: what was stored before.
    """
    format, scaling = storage.format, storage.scaling
    if storage.domain == "sqrt":
        # Negative numbers count as zero. What is not finite is in a block that is bad already.
        parts = [lax.sqrt(_from_bits(jnp.maximum(_bits(x), 0))) for x in parts]
    scales = scaling.remember(_store(measured, storage), previous)
    scale = spread(jax.tree.map(scale_number, scales))
    # 0 where nothing can be scaled: all is zero, or something is not finite. The division comes
    # last: XLA puts its result down, and would do what comes behind anew for every element.
    multiplier = 4 / jnp.where(scale > 0, jnp.maximum(scale, _SMALLEST_SCALE), jnp.inf)
    ys = [u * multiplier for u in parts]
    factor = unit_of(storage) / 4
    indices = [_round(y, storage, b, factor) for y, b in zip(ys, bits, strict=True)]
    live = (multiplier > 0).astype(jnp.int32)
    if not format.zero:
        indices = [format.nonzero(i, live) for i in indices]
    elif not isinstance(format, Minifloat):  # where zero is not the first of the list
        indices = [i * live for i in indices]
    if scaling.scale == "power_of_two":
        indices, scales = _settle_power_of_two(indices, scales, storage, measure, spread)
    return [format.code(i, y) for i, y in zip(indices, ys, strict=True)], scales


def decode_scaled(codes: jax.Array, scale: jax.Array, storage: Storage) -> jax.Array:
    """Numbers of codes (int32) under scales (float32) that broadcast against them."""
    # The largest code times 1/top is exactly 1 for every format: it decodes to the scale.
    value = storage.format.value(codes, 1 / unit_of(storage), finite=True)
    return _scaled(value, scale, storage)


def decode_by_half(
    stored: jax.Array, scale: jax.Array, storage: Storage, known: jax.Array
) -> jax.Array:
    """The same numbers of codes as they are stored (one an element), the way CPUs are fast at.

    For formats that fit float16. ``known`` is a bool[] that is true, which the compiler must not
    know: it keeps XLA from multiplying the constant into the scale.
    """
    factor = jnp.where(known, jnp.float32(1 / unit_of(storage)), 0)
    return _scaled(storage.format.value_by_half(stored, factor), scale, storage)


def _scaled(value: jax.Array, scale: jax.Array, storage: Storage) -> jax.Array:
    if storage.domain == "linear":
        return value * scale
    # A root near 2^64 may have been rounded up to it, and its square would be infinite.
    u = value * jnp.where(scale < jnp.inf, jnp.minimum(scale, _LARGEST_ROOT), scale)
    return u * u


def decode_unscaled(codes: jax.Array, storage: Storage) -> jax.Array:
    """Numbers of codes (int32) in a format that needs no scale."""
    u = storage.format.value(codes)
    return _square(u) if storage.domain == "sqrt" else u


def _round(
    y: jax.Array, storage: Storage, bits: jax.Array | None, factor: float = 1.0
) -> jax.Array:
    """Index of the grid point that ``y * factor`` rounds to."""
    if bits is not None and storage.domain == "sqrt":
        return storage.format.round_root(y, bits, factor)
    return storage.format.round(y, bits, factor)


def _special(format: Format, u: jax.Array) -> jax.Array:
    assert isinstance(format, Minifloat)  # only minifloats hold NaN
    return format.special_index(u)


def unit_of(storage: Storage) -> float:
    """What number of the grid a scale of 1.0 stands for."""
    top = storage.format.top
    if isinstance(storage.scaling, NoScale):
        return 1.0
    return 2.0 ** np.floor(np.log2(top)) if storage.scaling.scale == "power_of_two" else top


def magnitudes(parts: Sequence[jax.Array], storage: Storage) -> list[jax.Array]:
    """What elements ask of their scale, as a float32's bits (int32); infinity or NaN where bad.

    As integers, since XLA's floating maximum on CPUs drops NaN. In the domain "sqrt" still of the
    numbers, not of their roots: the largest is the same.
    """
    format = storage.format
    # A map may reach further up than down; elsewhere negative numbers count as zero.
    both = format.signed and storage.domain == "linear"
    reach = format.top / -format.bottom if both else 0.0
    return [_magnitude(x, reach) for x in parts]


def _magnitude(x: jax.Array, reach: float) -> jax.Array:
    """The bits of a magnitude, that of negative numbers times a factor."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    if reach == 1:
        return magnitude
    below = (bits < 0) & (magnitude < _INFINITY)
    if reach == 0:
        return jnp.where(below, 0, magnitude)
    stretched = jnp.minimum(jnp.abs(x) * jnp.float32(reach), _LARGEST)
    return jnp.where(below, _bits(stretched), magnitude)


def _store(measured: Any, storage: Storage) -> Any:
    format, scaling = storage.format, storage.scaling
    if storage.domain == "sqrt":
        measured = jax.tree.map(_root, measured)
    if isinstance(scaling, NoScale):
        # One scale for all: 1.0, or what cannot be scaled.
        one = jnp.where(measured < _INFINITY, jnp.int32(_ONE), measured)
        measured = jnp.where(measured > 0, one, 0)
    return jax.tree.map(
        lambda bits: store_scale(
            bits,
            scaling.scale,
            top=format.top,
            upwards=storage.stochastic,
            coarse=format.signed and format.bottom != -format.top,
        ),
        measured,
    )


def _settle_power_of_two(
    indices: Sequence[jax.Array],
    scales: jax.Array,
    storage: Storage,
    measure: Callable[[Sequence[jax.Array]], jax.Array],
    spread: Callable[[jax.Array], jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """Halve the scale of blocks that rounding left with no number above half the largest.

    Their numbers are on the finer grid too, so nothing changes in value; without it, storing what
    was read back would pick the finer scale, and the codes would not be the same.
    """
    format = storage.format
    assert isinstance(format, Minifloat)
    halve = (measure(indices) <= format.half_top_index) & (scales > 1) & (scales < 255)
    spreaded = spread(halve)
    indices = [jnp.where(spreaded, format.doubled(i), i) for i in indices]
    return indices, jnp.where(halve, scales - 1, scales)


def _root(measured: jax.Array) -> jax.Array:
    """The bits of a root, of a number's bits."""
    root = _bits(lax.sqrt(_from_bits(measured)))
    return jnp.where(measured < _INFINITY, root, measured)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _square_root(x: jax.Array) -> jax.Array:
    # Finite negative numbers count as zero; NaN and infinities stay bad.
    return jnp.where((x < 0) & (x > -jnp.inf), 0, lax.sqrt(x))


def _square(u: jax.Array) -> jax.Array:
    # A root near 2^64 may have been rounded up to it; only infinity's square is infinite.
    return jnp.where(jnp.isinf(u), jnp.inf, jnp.minimum(u * u, _LARGEST))
