"""How much of an average one step left as it was: what stalling means."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from qstate.numerics import unpacked
from qstate.state._average import Average, read, stored_leaves


def unchanged_share(steps: Iterable[tuple[Average, Average]]) -> jax.Array:
    """Share of elements whose stored code one step did not change, float32[].

    Leaves that are kept exact do not count, unless all are. Where scales are powers of two a code
    also changes when its block's scale flips, so there it is the stored number that is compared.
    NaN where there is no element at all.

    Args:
      steps: averages before and after, counted together.
    """
    same, total = jnp.zeros([], jnp.float32), 0
    for before, after in steps:
        for old, new in _stored(before, after):
            # Sums of 0 and 1 in float32 are exact to 2^24: rows first keeps large leaves exact.
            rows = jnp.sum(old == new, axis=-1, dtype=jnp.float32)
            same += jnp.sum(rows, dtype=jnp.float32)
            total += old.size
    return same / total if total else jnp.full([], jnp.nan, jnp.float32)


def _stored(before: Average, after: Average) -> Iterable[tuple[jax.Array, jax.Array]]:
    """Pairs of what a step is judged by, one element each, for every leaf that counts."""
    quantized = any(shape is not None for shape in before.shapes)
    pairs = zip(before.shapes, stored_leaves(before)[0], stored_leaves(after)[0], strict=True)
    for i, (shape, old, new) in enumerate(pairs):
        if old[0] is None or (quantized and shape is None):
            continue
        if shape is None or before.storage.scaling.scale == "power_of_two":
            old, new = read(before, i, *old), read(after, i, *new)
        else:
            old = unpacked(old[0], before.storage, shape)
            new = unpacked(new[0], before.storage, shape)
        yield jnp.atleast_1d(old), jnp.atleast_1d(new)
