"""One step of several averages at once: read, advance, keep.

An optimizer is written once, as a rule on float32 trees, and never sees a code. Leaves that are
stored in few bits take their step one after the other, so that at any moment one of them is in
float32, not all.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from qstate.kernels import filled
from qstate.numerics import random_bits, split_key
from qstate.state._average import (
    Average,
    Stored,
    has_average,
    leaves_of,
    pack,
    read,
    stored_leaves,
    with_leaves,
    write,
)
from qstate.state._damage import check_average
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
      rule: ``(gradients, *old averages) -> (directions, new averages)``, on float32 trees.
      updates: the gradients.
      averages: the averages, with the tree structure of ``updates``.
      ticks: their clocks in this step.
      policies: their reset policies.
      key: uint32[2].

    Returns:
      The directions, in the dtypes of ``updates``, zero for integers; the averages; the next key.
    """
    for average in averages:
        check_average(average)
    gradients, treedef = leaves_of(updates)
    stored = [list(p) for p in zip(*(stored_leaves(a)[0] for a in averages), strict=True)]
    draws, key = _draws(averages, key)
    directions: list[Any] = [_untouched(g) for g in gradients]
    averaged = [
        i for i, g in enumerate(gradients) if has_average(g) and stored[i][0][0] is not None
    ]
    exact = [i for i in averaged if all(a.shapes[i] is None for a in averages)]

    # Exact leaves step together, as in optax: XLA rounds a division by one scalar differently
    # where there are several of them.
    old = [[stored[i][j][0] for i in exact] for j in range(len(averages))]
    moved, fresh = rule([gradients[i].astype(jnp.float32) for i in exact], *old)
    for place, i in enumerate(exact):
        directions[i] = moved[place].astype(gradients[i].dtype)
        stored[i] = [(t.kept(x[place]), None) for t, x in zip(ticks, fresh, strict=True)]

    gate = _Gate(averages[0].age)
    for i in [i for i in averaged if i not in exact]:

        def pack_leaf(leaf, i=i):
            return [(pack(a, i, c), s) for a, (c, s) in zip(averages, leaf, strict=True)]

        def advance(gradient, leaf, i=i):
            old = [read(a, i, *pair) for a, pair in zip(averages, leaf, strict=True)]
            direction, fresh = rule(gradient.astype(jnp.float32), *old)
            new = [
                write(a, i, t.kept(x), draw(i, x.shape), scales)
                for a, t, x, draw, (_, scales) in zip(
                    averages, ticks, fresh, draws, leaf, strict=True
                )
            ]
            return direction.astype(gradient.dtype), new

        directions[i], stored[i] = gate(advance, gradients[i], stored[i])
        if any(a.storage.packed for a in averages):
            # Behind a gate of its own: fused with the rounding it would be ten times as slow on a
            # CPU, since no loop over halves of blocks is vectorized.
            stored[i] = gate(pack_leaf, stored[i])

    new = [
        _advanced(average, tick, policy, [leaf[j] for leaf in stored])
        for j, (average, tick, policy) in enumerate(zip(averages, ticks, policies, strict=True))
    ]
    return treedef.unflatten(directions), new, key


def keep_averages(
    fresh: Sequence[Any], averages: Sequence[Average], ticks: Sequence[Tick], key: jax.Array
) -> tuple[list[Average], jax.Array]:
    """The averages with new values (trees of float32 arrays), all at once, and the next key."""
    for average in averages:
        check_average(average)
    draws, key = _draws(averages, key)
    kept = []
    for new, average, tick, draw in zip(fresh, averages, ticks, draws, strict=True):
        pairs, treedef = stored_leaves(average)
        for i, x in enumerate(treedef.flatten_up_to(new)):
            if x is not None:
                codes, scales = write(average, i, tick.kept(x), draw(i, x.shape), pairs[i][1])
                pairs[i] = pack(average, i, codes), scales
        kept.append(_advanced(average, tick, None, pairs))
    return kept, key


class _Gate:
    """Lets one leaf after the other pass, so that they share their temporaries.

    A leaf steps in a branch that is taken when the leaf before is done. Nothing less keeps XLA's
    schedulers from starting all leaves at once. Outside of a trace operations run in order anyway.
    """

    def __init__(self, age: jax.Array):
        # 1, which the compiler cannot know.
        self._passed = jnp.minimum(age, 0) + 1 if isinstance(age, jax.core.Tracer) else None

    def __call__(self, step: Callable[..., Any], *operands: Any) -> Any:
        if self._passed is None:
            return step(*operands)
        result = jax.eval_shape(step, *operands)
        self._passed, result = lax.cond(
            self._passed > 0,
            lambda passed: (passed + 1, step(*operands)),
            lambda passed: (passed, jax.tree.map(lambda r: filled(r, 0), result)),
            self._passed,
        )
        return result


Draw = Callable[[int, tuple[int, ...]], jax.Array | None]


def _draws(averages: Sequence[Average], key: jax.Array) -> tuple[list[Draw], jax.Array]:
    """For every average 16 random bits an element of any leaf; one hash serves two averages."""
    if not any(a.storage.stochastic for a in averages):
        return [lambda leaf, shape: None] * len(averages), key
    key, words = split_key(key, max(len(a.shapes) for a in averages))

    def draw(j: int, leaf: int, shape: tuple[int, ...]) -> jax.Array | None:
        if not averages[j].storage.stochastic or averages[j].shapes[leaf] is None:
            return None
        hashed = random_bits(words[leaf] + jnp.uint32(j // 2), shape)
        return hashed & 0xFFFF if j % 2 else hashed >> 16

    return [functools.partial(draw, j) for j in range(len(averages))], key


def _advanced(
    average: Average, tick: Tick, policy: Every | Adaptive | None, leaves: list[Stored]
) -> Average:
    """The average with what is kept of every leaf, its clock, and what its policy saw."""
    new = with_leaves(average, leaves, age=tick.kept_age(), mass=tick.kept_mass())
    if average.monitor is None or not isinstance(policy, Adaptive):
        return new
    share = unchanged_share([(average, new)])
    monitor = average.monitor.observe(share, tick, policy.tolerance)
    return dataclasses.replace(new, monitor=monitor)


def _untouched(gradient: Any) -> Any:
    """The update of a leaf without an average: zero, so that integers stay as they are."""
    if gradient is None or has_average(gradient):
        return gradient
    dtype = jnp.int32 if gradient.dtype == jax.dtypes.float0 else gradient.dtype
    return jnp.zeros(gradient.shape, dtype)
