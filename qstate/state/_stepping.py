"""A transformation's step: the update and the parameters in one pass, where it has such a way.

The way is an attribute of its update function, so that nothing else about a transformation is new:
what does not know of it, such as `optax.chain`, leaves it out.
"""

from collections.abc import Callable
from typing import Any

import optax

_STEP, _MOVE = "qstate_step", "qstate_move"

Step = Callable[..., tuple[Any, Any]]


def with_step(tx: optax.GradientTransformationExtraArgs, own: Step) -> Any:
    """A transformation with its own ``(grads, state, params, **extra) -> (params, state)``."""
    setattr(tx.update, _STEP, own)
    return tx


def with_move(tx: optax.GradientTransformationExtraArgs, move: Step) -> Any:
    """A transformation with ``(grads, state, finish) -> (params, state)``.

    ``finish`` is a `Finish`: what becomes of the parameters behind the last link of a chain.
    """
    setattr(tx.update, _MOVE, move)
    return tx


def move_of(tx: optax.GradientTransformation) -> Step:
    """What `with_move` was given."""
    return getattr(tx.update, _MOVE)


def step(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, **extra_args: Any
) -> tuple[Any, Any]:
    """One optimizer step: the parameters and the state that follow.

    It stands for ``updates, opt_state = tx.update(grads, opt_state, params)`` and then
    ``params = optax.apply_updates(params, updates)``, for any optax transformation. Where ``tx``
    can, the parameters are updated in the same pass that reads the averages, and no updates are
    ever in memory: `qstate.adam`, `qstate.adamw`, and they inside of `qstate.with_loss_scale` and
    `qstate.with_master_weights`.

    Args:
      tx: the optimizer.
      grads: the gradients, a tree like the parameters.
      opt_state: the optimizer's state.
      params: the parameters.
      **extra_args: passed on to ``tx.update``.

    Returns:
      The parameters, in their dtypes, and the state.

    Numerics:
      The same as the two calls, under `jax.jit` and in float32 to the last bit; inside of wrappers
      to the last place, since there the two calls round the update before they add it. With 16-bit
      parameters or gradients the pass computes in float32 and rounds once.

    Example:
      >>> import functools, jax, jax.numpy as jnp, qstate
      >>> tx = qstate.adamw(1e-3, storage="fp8")
      >>> params = {"w": jnp.ones((64, 128))}
      >>> opt_state = tx.init(params)
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def train_step(params, opt_state, grads):
      ...     return qstate.step(tx, grads, opt_state, params)
      >>> params, opt_state = train_step(params, opt_state, {"w": jnp.ones((64, 128))})
    """
    own: Step | None = getattr(tx.update, _STEP, None)
    if own is not None:
        return own(grads, opt_state, params, **extra_args)
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state
