"""What a loss scale in a state gives away: a wrong order of links, a scale that fell to its floor.

Both are read out of a state, where its owner reads it: nothing is computed or sent to the host
inside of a jitted step.
"""

from typing import Any

import jax
import jax.core

from qstate.state import warn

SKIPPED_IN_A_ROW = 5
"""So many skipped steps in a row, at a scale that cannot fall further, are no probing any more."""


def advise_on_order(opt_state: Any, state: Any) -> None:
    """Warns of links that see scaled gradients.

    Args:
      opt_state: the whole state.
      state: the `LossScaleState` in it.
    """
    before = _links_before(opt_state, state)
    if before and state.scaler.settings.kind != "none":
        warn(
            f"{before} link{'s' * (before > 1)} of the chain come{'s' * (before == 1)} before "
            "with_loss_scale and see gradients that are still multiplied by the loss scale: a clip "
            "there is one at max_norm / scale. Unscale first: qstate.with_loss_scale("
            "optax.chain(optax.clip_by_global_norm(1.0), ...), loss_scale)."
        )


def advise_on_floor(opt_state: Any, state: Any, numbers: Any) -> None:
    """Warns of a scale that can fall no further while every step is skipped.

    Args:
      opt_state: the whole state.
      state: the `LossScaleState` in it.
      numbers: the same, with plain arrays; nothing is said of traced ones.
    """
    if isinstance(numbers.notfinite_count, jax.core.Tracer):
        return
    skipped, scale = jax.device_get((numbers.notfinite_count, numbers.scaler.value))
    settings = numbers.scaler.settings
    stuck = settings.kind != "dynamic" or scale <= settings.smallest
    if stuck and skipped >= SKIPPED_IN_A_ROW:
        warn(
            f"the last {skipped} steps were all skipped for infinite or NaN gradients, and the "
            f"loss scale is {scale:g}, as small as it may be: the optimizer stands still. No scale "
            "helps where the forward pass overflows or the mathematics gives NaN; "
            "qstate.explain_nonfinite(grads, opt_state, loss=loss) says which leaves and why."
            + (_POISONED if _accumulates_outside(opt_state, state) else "")
        )


_POISONED = (
    " optax.MultiSteps around with_loss_scale keeps an overflow in its accumulator for good "
    "(0 * inf is NaN): put it inside, "
    "qstate.with_loss_scale(optax.MultiSteps(tx, k).gradient_transformation(), loss_scale)."
)


def _links_before(node: Any, state: Any) -> int:
    """How many links of chains come before the loss scale."""
    if node is state or not isinstance(node, tuple):
        return 0
    for index, child in enumerate(node):
        if _holds(child, state):
            is_chain = type(node) is tuple  # a NamedTuple is one transformation's state
            return (index if is_chain else 0) + _links_before(child, state)
    return 0


def _accumulates_outside(node: Any, state: Any) -> bool:
    if node is state or not isinstance(node, tuple):
        return False
    inner = next((child for child in node if _holds(child, state)), None)
    return hasattr(node, "acc_grads") or _accumulates_outside(inner, state)


def _holds(node: Any, state: Any) -> bool:
    """Whether a state is a node or part of it."""
    return any(found is state for found in jax.tree.leaves(node, is_leaf=lambda n: n is state))
