"""From a direction to the parameters: weight decay and learning rate behind a transformation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qstate.kernels import Scalars
from qstate.state import Finish, leaves_of, move_of, with_step


def descend(
    direction: optax.GradientTransformationExtraArgs,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule | None = None,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """A chain of a transformation, decayed weights and a learning rate, which `step` can fuse.

    Args:
      direction: a transformation that was given its ``move``.
      learning_rate: a number or a schedule.
      weight_decay: a number or a schedule; None for a chain without that link.
      mask: which leaves decay, as in `optax.add_decayed_weights`.
    """
    behind = [optax.scale_by_learning_rate(learning_rate)]
    if weight_decay is not None:
        behind.insert(0, optax.add_decayed_weights(weight_decay, mask))
    move = move_of(direction)

    def step(grads, state, params, **extra_args):
        del extra_args
        first, *rest = state
        scalars = {"step_size": -_at(learning_rate, rest[-1])}
        if weight_decay is not None:
            scalars["weight_decay"] = _at(weight_decay, rest[0])
        finish = Finish(
            params,
            _lands(params, False if weight_decay is None else mask),
            {name: jnp.asarray(value, jnp.float32) for name, value in scalars.items()},
        )
        landed, first = move(grads, first, finish)
        # Of the links behind only their counts are left to do.
        after: Any = optax.chain(*behind).update(params, tuple(rest), params)[1]
        return landed, (first, *after)

    return with_step(optax.chain(direction, *behind), step)


@dataclasses.dataclass(frozen=True)
class _Land:
    """A parameter one step on."""

    decays: bool

    def __call__(self, scalars: Scalars, param: jax.Array, direction: jax.Array) -> jax.Array:
        if self.decays:
            direction = direction + scalars["weight_decay"] * param
        return param + scalars["step_size"] * direction


def _lands(params: Any, mask: Any) -> Any:
    """How every parameter lands, a tree like the parameters."""
    leaves, treedef = leaves_of(params)
    if mask is None:
        mask = True
    elif callable(mask):
        mask = mask(params)
    decays = iter(jax.tree.leaves(jax.tree.broadcast(mask, params)))
    return treedef.unflatten(None if p is None else _Land(bool(next(decays))) for p in leaves)


def _at(value: Any, state: Any) -> Any:
    """A number, or what a schedule is at the count in its link's state."""
    if not callable(value):
        return value
    return value(optax.tree.get(state, "count"))
