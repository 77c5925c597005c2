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
            f"{before} link{'s' * (before > 1)} of the chain before with_loss_scale: gradients are "
            "still multiplied by the loss scale there, so that a clip is one at max_norm / scale. "
            "Unscale first: qstate.with_loss_scale("
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
    """How many links of chains come before the loss scale.

    A chain's state is a plain tuple. That of `optax.named_chain` is a mapping, whose order is lost
    on the way through `jax.jit`: there it cannot be seen.
    """
    index, child = _way_to(node, state)
    if child is None:
        return 0
    return (index if type(node) is tuple else 0) + _links_before(child, state)


def _accumulates_outside(node: Any, state: Any) -> bool:
    _, child = _way_to(node, state)
    if child is None:
        return False
    return hasattr(node, "acc_grads") or _accumulates_outside(child, state)


def _way_to(node: Any, state: Any) -> tuple[int, Any]:
    """The child of a node that is a state or holds it, and its place; None at the state itself."""
    if node is not state:
        for index, child in enumerate(jax.tree.leaves(node, is_leaf=lambda n: n is not node)):
            below = jax.tree.leaves(child, is_leaf=lambda n: n is state)
            if any(found is state for found in below):
                return index, child
    return 0, None
