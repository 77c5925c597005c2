"""Arrays to codes and scales, and back: the definition that every kernel has to equal bit for bit.

::

    u      = x                         (domain "sqrt": the square root of x)
    scale  = largest |u| of the block
    y      = u * (4 / scale) * (top / 4)
    index  = round(locate(y))          nearest, or stochastic from 16 random bits
    codes  = sign and index            packed two a byte below 5 bits

    decode = value(codes) / top * scale    (domain "sqrt": squared)

Reciprocals of 4, not of 1: ``4 / scale`` is a normal float32 for every normal scale, so nothing is
flushed to zero and nothing overflows.
"""

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
from qstate.numerics._rounding import RANDOM_BITS, round_nearest, round_stochastic
from qstate.numerics._scale_formats import load_scale, store_scale
from qstate.numerics._scaling import Block, NoScale
from qstate.numerics._storage import Storage

Scales = None | jax.Array | tuple[jax.Array, ...]

_LARGEST = np.finfo(np.float32).max


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
    blocks = _blocks(storage, shape)
    codes = unpack(codes, blocks) if storage.packed else blocks.split(codes)
    u = storage.format.value(codes, 1 / _unit(storage))
    if storage.has_scales:
        # The largest code times 1/top is exactly 1 for every format: it decodes to the scale.
        u = u * _spread(scales, storage, blocks)
    return blocks.join(_square(u) if storage.domain == "sqrt" else u).reshape(shape)


def unpacked(codes: jax.Array, storage: Storage, shape: tuple[int, ...]) -> jax.Array:
    """Codes with one array element each."""
    blocks = _blocks(storage, shape)
    return blocks.join(unpack(codes, blocks)) if storage.packed else codes


def packed(codes: jax.Array, storage: Storage, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `unpacked`."""
    if not storage.packed:
        return codes
    blocks = _blocks(storage, shape)
    return pack(blocks.split(codes), blocks)


def encode_unpacked(
    x: jax.Array, storage: Storage, bits: jax.Array | None, previous: Scales = None
) -> tuple[jax.Array, Scales]:
    """`encode` of a float32 array by given bits (uint32 below 2^16), an array element a code."""
    if storage.exact:
        return x, None
    blocks = _blocks(storage, x.shape)
    x = blocks.split(x.reshape(x.shape or (1,)))
    bits = None if bits is None else blocks.split(bits.reshape(bits.shape or (1,)))
    format = storage.format
    u = _square_root(x) if storage.domain == "sqrt" else x
    if not storage.has_scales:
        index = jnp.where(
            jnp.isfinite(u), _round(u, storage, bits, live=u != 0), _special(format, u)
        )
        return blocks.join(format.code(index, u)), None

    scales = storage.scaling.remember(_measure(u, storage, blocks), previous)
    scale = _spread(scales, storage, blocks)
    live = scale > 0  # neither zero nor NaN
    # The select also keeps XLA from multiplying the constant into the reciprocal, to overflow.
    y = jnp.where(live, u * jnp.minimum(4 / scale, _LARGEST), 0) * jnp.float32(_unit(storage) / 4)
    index = _round(y, storage, bits, live)
    if storage.scaling.scale == "power_of_two":
        index, scales = _settle_power_of_two(index, scales, storage, blocks)
    codes = jnp.where(live, format.code(index, y), 0).astype(format.dtype)
    return blocks.join(codes), scales


def _round(y: jax.Array, storage: Storage, bits: jax.Array | None, live: jax.Array) -> jax.Array:
    """Index of the grid point that ``y`` rounds to."""
    format = storage.format
    index, fraction = format.locate(y)
    if bits is not None:
        if storage.domain == "sqrt":
            # Linear in the average: (y^2 - low^2) / (high^2 - low^2).
            low, high = format.value_at(index), format.value_at(index + 1)
            fraction = fraction * ((y + low) / (high + low))
        index = round_stochastic(index, fraction, bits)
    else:
        index = round_nearest(index, fraction)
    return index if format.zero else jnp.where(live, format.nonzero(index), index)


def _special(format: Format, u: jax.Array) -> jax.Array:
    assert isinstance(format, Minifloat)  # only minifloats hold NaN
    return format.special_index(u)


def _blocks(storage: Storage, shape: tuple[int, ...]) -> Blocks:
    """How an array is worked on: in its scales' blocks, or in those that share bytes."""
    shape = shape or (1,)
    if storage.packed or isinstance(storage.scaling, Block):
        return block_layout(shape, storage.scaling.block)
    return Blocks(len(shape) - 1, max(shape[-1], 1), shape[-1], 0)


def _unit(storage: Storage) -> float:
    """What number of the grid a scale of 1.0 stands for."""
    top = storage.format.top
    if isinstance(storage.scaling, NoScale):
        return 1.0
    return 2.0 ** np.floor(np.log2(top)) if storage.scaling.scale == "power_of_two" else top


def _measure(u: jax.Array, storage: Storage, blocks: Blocks) -> Any:
    format, scaling = storage.format, storage.scaling
    if format.bottom == -format.top:
        magnitude = jnp.abs(u)
    elif format.signed:
        # A map that reaches further up than down: scale so that neither end saturates.
        stretched = jnp.minimum(u * jnp.float32(format.top / format.bottom), _LARGEST)
        magnitude = jnp.where(u < 0, stretched, u)
    else:
        magnitude = jnp.maximum(u, 0)
    # Not NaN: XLA's maximum on CPUs drops it. Infinity marks the block as bad just as well.
    magnitude = jnp.where(jnp.isfinite(u), magnitude, jnp.inf)
    measured: Any = scaling.measure(magnitude, blocks)
    if isinstance(scaling, NoScale):
        one = jnp.where(measured > 0, jnp.float32(1), jnp.float32(0))
        measured = jnp.where(jnp.isfinite(measured), one, jnp.float32(jnp.nan))
    return jax.tree.map(
        lambda m: store_scale(
            m,
            scaling.scale,
            top=format.top,
            upwards=storage.stochastic,
            coarse=format.signed and format.bottom != -format.top,
        ),
        measured,
    )


def _spread(scales: Scales, storage: Storage, blocks: Blocks) -> jax.Array:
    return storage.scaling.spread(jax.tree.map(load_scale, scales), blocks)  # pyright: ignore


def _settle_power_of_two(
    index: jax.Array, scales: jax.Array, storage: Storage, blocks: Blocks
) -> tuple[jax.Array, jax.Array]:
    """Halve the scale of blocks that rounding left with no number above half the largest.

    Their numbers are on the finer grid too, so nothing changes in value; without it, storing what
    was read back would pick the finer scale, and the codes would not be the same.
    """
    format, scaling = storage.format, storage.scaling
    assert isinstance(format, Minifloat)
    assert isinstance(scaling, Block)
    halve = (scaling.measure(index, blocks) <= format.half_top_index) & (scales > 1)
    halve &= scales < 255
    index = jnp.where(scaling.spread(halve, blocks), format.doubled(index), index)
    return index, jnp.where(halve, scales - 1, scales).astype(scales.dtype)


def _square_root(x: jax.Array) -> jax.Array:
    # Finite negative numbers count as zero; NaN and infinities stay bad.
    return jnp.where((x < 0) & (x > -jnp.inf), 0, lax.sqrt(x))


def _square(u: jax.Array) -> jax.Array:
    # A root near 2^64 may have been rounded up to it; only infinity's square is infinite.
    return jnp.where(jnp.isinf(u), jnp.inf, jnp.minimum(u * u, _LARGEST))
