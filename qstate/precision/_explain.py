"""Why gradients are infinite or NaN: which leaves, how many numbers, and what that speaks for."""

import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from qstate.precision._advice import SKIPPED_IN_A_ROW
from qstate.precision._dtypes import is_inexact
from qstate.precision._loss_scale import find_loss_scales, plain
from qstate.report import aligned
from qstate.state import path_name


class NonfiniteLeaf(NamedTuple):
    """One leaf of gradients that are not all finite."""

    path: str
    dtype: str
    elements: int
    infinite: int
    nan: int


class NonfiniteReport(NamedTuple):
    """What `explain_nonfinite` found; printed, a table and a paragraph.

    Attributes:
      leaves: the leaves that are not finite.
      inspected: how many leaves were looked at.
      scale: the loss scale at the time, None without loss scaling.
      skipped: steps skipped in a row before this one, None where no state says.
      cause: one of ``"finite"``, ``"parameters"``, ``"forward overflow"``, ``"probing"``,
        ``"collapse"``, ``"overflow"``, ``"mathematics"``.
      advice: what it means and what to do.
    """

    leaves: list[NonfiniteLeaf]
    inspected: int
    scale: float | None
    skipped: int | None
    cause: str
    advice: str

    def __str__(self) -> str:
        scale = "" if self.scale is None else f", loss scale {_readable(self.scale)}"
        skipped = "" if not self.skipped else f", {self.skipped} steps skipped in a row"
        head = f"{len(self.leaves)} of {self.inspected} leaves are not finite{scale}{skipped}"
        cells = [("leaf", "dtype", "elements", "inf", "NaN")]
        cells += [(n, d, f"{e:,}", f"{i:,}", f"{k:,}") for n, d, e, i, k in self.leaves]
        lines = aligned(cells, texts=2)
        table = [lines[0], "-" * len(lines[0]), *lines[1:]] if self.leaves else []
        return "\n".join([head, *table, f"{self.cause}: {self.advice}"])


_ADVICE = {
    "finite": "all gradients are finite; the step is taken.",
    "parameters": "the parameters are not finite already, so a step with bad gradients was taken "
    "before. Go back to a checkpoint, and guard steps with "
    "qstate.with_loss_scale(tx, jmp.NoOpLossScale()).",
    "forward overflow": "the loss itself is not finite, so the damage was done before any scaling, "
    "and no loss scale helps. In float16 activations or attention logits above 65504 are the usual "
    "cause: run softmax, norms and sums in float32 (qstate.fp32_island), or compute in bfloat16. "
    "If it persists there, look for a learning rate or an initialisation that is too large.",
    "probing": "infinite gradients under a loss scale that can still fall: the normal way in which "
    "a dynamic scale finds its ceiling. The step is skipped and the scale reduced; nothing is to "
    "be done.",
    "collapse": "the loss scale has fallen as far as it may, or keeps falling without a step "
    "taken: that is no probing. Either the backward pass overflows whatever the scale, so run what "
    "overflows in float32 (qstate.fp32_island) or compute in bfloat16; or training has diverged, "
    "so look at the learning rate and the loss curve before it.",
    "overflow": "infinite gradients under a loss scale that does not move. In float16, take a "
    "smaller scale or a jmp.DynamicLossScale.",
    "mathematics": "gradients that have float32's range do not overflow by rounding: this is a "
    "logarithm of zero, a division by zero, a root at zero, or an exploding update. Find the "
    'operation with jax.config.update("jax_debug_nans", True) on a small example. (Gradients that '
    "are float32 but computed in float16 overflow all the same: scale the loss.)",
}


def explain_nonfinite(
    grads: Any, opt_state: Any = None, *, loss: Any = None, params: Any = None
) -> NonfiniteReport:
    """Says which gradients are infinite or NaN, and which cause fits.

    Call it outside of `jax.jit`, where a step was skipped: it reads the numbers.

    Args:
      grads: the gradients that went into ``tx.update``, still multiplied by any loss scale.
      opt_state: the optimizer's state before that step; for the loss scale and the skipped steps.
      loss: the loss, not scaled; tells an overflow of the forward pass from one of the backward
        pass.
      params: the parameters; tells whether an earlier step did the damage.

    Returns:
      A `NonfiniteReport`.

    Raises:
      TypeError: inside of `jax.jit`, where there are no numbers to read.

    Example:
      >>> import jax.numpy as jnp, jmp, optax, qstate
      >>> tx = qstate.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(jnp.float32(2**15)))
      >>> grads = {"w": jnp.array([1, jnp.inf, 2], jnp.float16), "b": jnp.zeros(2, jnp.float16)}
      >>> report = qstate.explain_nonfinite(grads, tx.init(grads), loss=0.7)
      >>> report.cause
      'probing'
      >>> print(str(report).split("probing")[0].strip())
      1 of 2 leaves are not finite, loss scale 32768
      leaf  dtype    elements  inf  NaN
      ---------------------------------
      w     float16         3    1    0
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((grads, loss))):
        raise TypeError(
            "explain_nonfinite reads numbers, which there are none of inside of jax.jit: return "
            "the gradients from the jitted step, or call it where a step was skipped"
        )
    leaves, inspected = _nonfinite_leaves(grads)
    state = next(map(plain, find_loss_scales(opt_state)), None)
    scale = None if state is None else float(state.scaler.value)
    skipped = None if state is None else int(state.notfinite_count)
    if state is not None and state.scaler.settings.kind == "none":
        scale = None
    cause = _cause(leaves, state, skipped or 0, loss, params)
    return NonfiniteReport(leaves, inspected, scale, skipped, cause, _ADVICE[cause])


def _cause(leaves: list[NonfiniteLeaf], state: Any, skipped: int, loss: Any, params: Any) -> str:
    if params is not None and _nonfinite_leaves(params)[0]:
        return "parameters"
    if loss is not None and not math.isfinite(float(jnp.asarray(loss, jnp.float32))):
        return "forward overflow"
    if not leaves:
        return "finite"
    if state is not None and state.scaler.settings.kind == "dynamic":
        stuck = float(state.scaler.value) <= state.scaler.settings.smallest
        return "collapse" if stuck or skipped >= 3 * SKIPPED_IN_A_ROW else "probing"
    static = state is not None and state.scaler.settings.kind == "static"
    half = any(leaf.dtype == "float16" for leaf in leaves)
    return "overflow" if half or static else "mathematics"


def _readable(scale: float) -> str:
    """A scale as a number, or as a power of two where it has many digits."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 and scale >= 1e6 else f"{scale:g}"


def _nonfinite_leaves(tree: Any) -> tuple[list[NonfiniteLeaf], int]:
    found, inspected = [], 0
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_inexact(leaf):
            continue
        inspected += 1
        counts = jax.device_get((jnp.sum(jnp.isinf(leaf)), jnp.sum(jnp.isnan(leaf))))
        infinite, nan = (int(count) for count in counts)
        if infinite or nan:
            name = path_name(path) or "(the array)"
            dtype = str(jnp.result_type(leaf))
            found.append(NonfiniteLeaf(name, dtype, int(np.size(leaf)), infinite, nan))
    return found, inspected
