"""One step of several averages at once: read, advance, keep.

An optimizer is written once, as a rule on float32 arrays, and never sees a code. Leaves that are
stored in few bits take their step one after the other, so that what one of them needs in between
is there for one, not for all.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from qstate.kernels import Arrays, Program, Scalars, placement_of, run
from qstate.numerics import half_word, random_bits, split_key
from qstate.state._average import (
    Average,
    Stored,
    has_average,
    leaves_of,
    stored_leaves,
    with_leaves,
    write,
)
from qstate.state._damage import check_average
from qstate.state._hints import Hints
from qstate.state._reset import Adaptive, Every, Tick, restarted
from qstate.state._unchanged import unchanged_share


@dataclasses.dataclass(frozen=True)
class Rule:
    """How an optimizer's averages move, and where it goes from there.

    Attributes:
      exact: ``(gradients, *old) -> (directions, new)`` on trees of float32, for leaves that are
        stored exactly.
      advance: ``(scalars, dense, old) -> new``, elementwise; ``dense[0]`` is the gradient. For
        leaves in few bits, as are the others. A function that compares equal from step to step.
      direct: ``(scalars, dense, new) -> direction``, likewise.
      scalars: all traced numbers that the two need, float32[].
    """

    exact: Callable[..., tuple[Any, Sequence[Any]]]
    advance: Callable[[Scalars, Arrays, Arrays], Arrays]
    direct: Callable[[Scalars, Arrays, Arrays], jax.Array]
    scalars: Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What becomes of the parameters.

    Attributes:
      params: the parameters.
      lands: a tree like them: ``(scalars, parameter, direction) -> new parameter``, elementwise, in
        float32. Functions that compare equal from step to step.
      scalars: what they need, float32[].
    """

    params: Any
    lands: Any
    scalars: Mapping[str, jax.Array]


def step_averages(
    rule: Rule,
    updates: Any,
    averages: Sequence[Average],
    ticks: Sequence[Tick],
    policies: Sequence[Every | Adaptive | None],
    key: jax.Array,
    *,
    finish: Finish | None = None,
    implementation: str | None = None,
    hints: Hints | None = None,
) -> tuple[Any, list[Average], jax.Array]:
    """Advances averages by one step.

    Args:
      rule: the optimizer.
      updates: the gradients.
      averages: the averages, with the tree structure of ``updates``.
      ticks: their clocks in this step.
      policies: their reset policies.
      key: uint32[2].
      finish: what to do with the directions; None to return them.
      implementation: of leaves in few bits; None picks.
      hints: how the leaves are partitioned, where that is known.

    Returns:
      The directions, in the dtypes of ``updates``, zero for integers, or the new parameters; the
      averages; the next key.
    """
    for average in averages:
        check_average(average)
    gradients, treedef = leaves_of(updates)
    params, lands = [None] * len(gradients), [None] * len(gradients)
    if finish is not None:
        params = treedef.flatten_up_to(finish.params)
        lands = treedef.flatten_up_to(finish.lands)
    stored = [list(p) for p in zip(*(stored_leaves(a)[0] for a in averages), strict=True)]
    stochastic = any(a.storage.stochastic for a in averages)
    words = jnp.zeros([len(gradients), 2], jnp.uint32)
    if stochastic:
        key, words = split_key(key, max(len(a.shapes) for a in averages))
    results: list[Any] = [_untouched(g) for g in gradients] if finish is None else list(params)
    averaged = [
        i for i, g in enumerate(gradients) if has_average(g) and stored[i][0][0] is not None
    ]
    exact = [i for i in averaged if all(a.shapes[i] is None for a in averages)]

    # Exact leaves step together, as in optax: XLA rounds a division by one scalar differently
    # where there are several of them.
    old = [[stored[i][j][0] for i in exact] for j in range(len(averages))]
    moved, fresh = rule.exact([gradients[i].astype(jnp.float32) for i in exact], *old)
    for place, i in enumerate(exact):
        results[i] = _landed(finish, lands[i], params[i], gradients[i], moved[place])
        stored[i] = [(t.kept(x[place]), None) for t, x in zip(ticks, fresh, strict=True)]

    kinds = tuple(None if t.due is None else t.kind for t in ticks)
    storages = tuple(a.storage for a in averages)
    scalars = dict(rule.scalars) | (dict(finish.scalars) if finish else {})
    for j, tick in enumerate(ticks):
        if tick.due is not None:
            scalars[f"due{j}"] = tick.due.astype(jnp.float32)
    known = [None] * len(gradients) if hints is None else hints.of(updates)
    passed = jnp.minimum(averages[0].age, 0) + 1  # 1, which the compiler cannot know
    for i in [i for i in averaged if i not in exact]:
        dense = [gradients[i]] if finish is None else [gradients[i], params[i]]
        program = Program(
            rule.advance,
            _Emit(rule.direct, lands[i]),
            _Keep(kinds),
            reads=storages,
            writes=storages,
            dtypes=(jnp.dtype(dense[-1].dtype),),
            onto=(None if finish is None else 1,),
        )
        (results[i],), stored[i], passed = run(
            program,
            gradients[i].shape,
            dense,
            stored[i],
            scalars,
            words[i] + jnp.arange(len(averages), dtype=jnp.uint32)[:, None],
            passed,
            implementation=implementation,
            placement=placement_of(gradients[i], known[i]),
        )
    new = [
        _advanced(average, tick, policy, [leaf[j] for leaf in stored])
        for j, (average, tick, policy) in enumerate(zip(averages, ticks, policies, strict=True))
    ]
    return treedef.unflatten(results), new, key


def keep_averages(
    fresh: Sequence[Any], averages: Sequence[Average], ticks: Sequence[Tick], key: jax.Array
) -> tuple[list[Average], jax.Array]:
    """The averages with new values (trees of float32 arrays), all at once, and the next key."""
    for average in averages:
        check_average(average)
    words = None
    if any(a.storage.stochastic for a in averages):
        key, words = split_key(key, max(len(a.shapes) for a in averages))
    kept = []
    for j, (new, average, tick) in enumerate(zip(fresh, averages, ticks, strict=True)):
        pairs, treedef = stored_leaves(average)
        for i, x in enumerate(treedef.flatten_up_to(new)):
            if x is None:
                continue
            bits = None
            if words is not None and average.storage.stochastic and average.shapes[i] is not None:
                # One word serves two averages, as in the kernels.
                bits = half_word(random_bits(words[i] + jnp.uint32(j // 2), x.shape), j)
            pairs[i] = write(average, i, tick.kept(x), bits, pairs[i][1])
        kept.append(_advanced(average, tick, None, pairs))
    return kept, key


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


@dataclasses.dataclass(frozen=True)
class _Emit:
    """A program's output: the direction, or the new parameter."""

    direct: Callable[[Scalars, Arrays, Arrays], jax.Array]
    land: Callable[[Scalars, jax.Array, jax.Array], jax.Array] | None

    def __call__(self, scalars: Scalars, dense: Arrays, fresh: Arrays) -> Arrays:
        direction = self.direct(scalars, dense, fresh)
        return [direction if self.land is None else self.land(scalars, dense[1], direction)]


@dataclasses.dataclass(frozen=True)
class _Keep:
    """What is kept of new averages: all, but where one is due to start over."""

    kinds: tuple[str | None, ...]  # of the resets, None where there are none

    def __call__(self, scalars: Scalars, fresh: Arrays) -> Arrays:
        return [
            x if kind is None else restarted(x, scalars[f"due{j}"] > 0, kind)
            for j, (x, kind) in enumerate(zip(fresh, self.kinds, strict=True))
        ]


def _landed(
    finish: Finish | None, land: Any, param: Any, gradient: jax.Array, direction: jax.Array
) -> jax.Array:
    """What comes out for an exact leaf."""
    if finish is None:
        return direction.astype(gradient.dtype)
    return land(finish.scalars, param.astype(jnp.float32), direction).astype(param.dtype)


def _untouched(gradient: Any) -> Any:
    """The update of a leaf without an average: zero, so that integers stay as they are."""
    if gradient is None or has_average(gradient):
        return gradient
    dtype = jnp.int32 if gradient.dtype == jax.dtypes.float0 else gradient.dtype
    return jnp.zeros(gradient.shape, dtype)
