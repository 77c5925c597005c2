"""One step of several averages at once: read, advance, keep.

An optimizer is written once, as a rule on float32 trees, and never sees a code. Under jit the trees
are names only: XLA reads, advances and keeps one leaf after the other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qstate.numerics import random_bits, split_key
from qstate.state._average import Average, dequantize_average, has_average, leaves_of, write
from qstate.state._reset import Adaptive, Every, Tick
from qstate.state._unchanged import unchanged_share

Rule = Callable[..., tuple[Any, Sequence[Any]]]


def step_averages(
    rule: Rule,
    updates: Any,
    averages: Sequence[Average],
    ticks: Sequence[Tick],
    policies: Sequence[Every | Adaptive | None],
    key: jax.Array,
) -> tuple[Any, list[Average], jax.Array]:
    """Advances averages by one step.

    Args:
      rule: ``(gradients, *old averages) -> (directions, new averages)``, on trees of float32 arrays
        with None for leaves that have no average.
      updates: the gradients.
      averages: the averages, with the tree structure of ``updates``.
      ticks: their clocks in this step.
      policies: their reset policies.
      key: uint32[2].

    Returns:
      The directions, in the dtypes of ``updates``, zero for integers; the averages; the next key.
    """
    gradients, treedef = leaves_of(updates)
    floats = treedef.unflatten(g.astype(jnp.float32) if has_average(g) else None for g in gradients)
    directions, fresh = rule(floats, *(dequantize_average(a) for a in averages))
    directions = treedef.unflatten(
        d.astype(g.dtype) if has_average(g) else _untouched(g)
        for g, d in zip(gradients, treedef.flatten_up_to(directions), strict=True)
    )
    averages, key = keep_averages(fresh, averages, ticks, policies, key)
    return directions, averages, key


def keep_averages(
    fresh: Sequence[Any],
    averages: Sequence[Average],
    ticks: Sequence[Tick],
    policies: Sequence[Every | Adaptive | None],
    key: jax.Array,
) -> tuple[list[Average], jax.Array]:
    """The averages with new values (trees of float32 arrays), and the next key."""
    bits = None
    if any(a.storage.stochastic for a in averages):
        key, words = split_key(key, max(len(a.shapes) for a in averages))
        bits = _Bits(words)
    kept = [
        _keep(new, average, tick, policy, bits and bits.of(j))
        for j, (new, average, tick, policy) in enumerate(
            zip(fresh, averages, ticks, policies, strict=True)
        )
    ]
    return kept, key


def _keep(
    fresh: Any,
    average: Average,
    tick: Tick,
    policy: Every | Adaptive | None,
    bits: Callable[[int, tuple[int, ...]], jax.Array] | None,
) -> Average:
    stored, treedef = leaves_of(average.codes)
    pairs = list(zip(stored, treedef.flatten_up_to(average.scales), strict=True))
    for i, x in enumerate(treedef.flatten_up_to(fresh)):
        if x is not None:
            draw = bits(i, x.shape) if bits and average.storage.stochastic else None
            pairs[i] = write(average, i, tick.kept(x), draw)
    new = dataclasses.replace(
        average,
        codes=treedef.unflatten(codes for codes, _ in pairs),
        scales=treedef.unflatten(scales for _, scales in pairs),
        age=tick.kept_age(),
        mass=tick.kept_mass(),
    )
    if average.monitor is None or not isinstance(policy, Adaptive):
        return new
    share = unchanged_share([(average, new)])
    return dataclasses.replace(
        new, monitor=average.monitor.observe(share, tick.age, policy.tolerance)
    )


class _Bits:
    """16 random bits an element for every leaf of every average; one hash serves two averages."""

    def __init__(self, words: jax.Array):
        self._words = words
        self._hashed = {}

    def of(self, average: int) -> Callable[[int, tuple[int, ...]], jax.Array]:
        pair, low = divmod(average, 2)

        def draw(leaf: int, shape: tuple[int, ...]) -> jax.Array:
            if (pair, leaf) not in self._hashed:
                words = self._words[leaf] + jnp.uint32(pair)
                self._hashed[pair, leaf] = random_bits(words, shape)
            hashed = self._hashed[pair, leaf]
            return hashed & 0xFFFF if low else hashed >> 16

        return draw


def _untouched(gradient: Any) -> Any:
    """The update of a leaf without an average: zero, so that integers stay as they are."""
    if gradient is None:
        return None
    dtype = jnp.int32 if gradient.dtype == jax.dtypes.float0 else gradient.dtype
    return jnp.zeros(gradient.shape, dtype)
