"""Loss scaling around an optimizer: unscale, look for infinity and NaN, then step or skip whole."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jmp
import optax
from jax import lax

from qstate.precision._advice import advise_on_floor, advise_on_order
from qstate.precision._dtypes import in_float32, is_inexact, is_narrow
from qstate.precision._find import find
from qstate.precision._master_weights import MasterWeightsState
from qstate.precision._narrow_parameters import (
    NarrowParametersWatch,
    call_off_warnings,
    waiting_warnings,
)
from qstate.precision._scaler import LARGEST_SCALE, Scaler, scaler_of
from qstate.precision._stochastic_params import StochasticRoundParamsState
from qstate.state import (
    check_dtype,
    filled,
    is_average,
    register_with_flax,
    step,
    with_step,
)


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`."""

    inner_state: Any
    scaler: Scaler  # the scale, float32[], and clean steps since it moved, int32[]
    notfinite_count: jax.Array  # int32[], steps skipped in a row
    total_notfinite: jax.Array  # int32[], steps skipped in all


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: jmp.LossScale,
    *,
    max_loss_scale: float = LARGEST_SCALE,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Unscales gradients, and skips the whole step where one of them is infinite or NaN.

    .. math::
       g = \frac{1}{S} \nabla (S L) \text{ in float32}, \qquad
       (u, s) \leftarrow \begin{cases}
         \mathrm{inner}(g, s) & \text{if all of } g \text{ is finite} \\
         (0, s) & \text{else}
       \end{cases}

    and the scale :math:`S` halves where a step was skipped, and doubles after so many clean steps
    (the numbers are those of the `jmp.DynamicLossScale`), as in `torch.amp.GradScaler`. A skipped
    step changes nothing else: no average, count, schedule, key, weight decay or accumulator of
    ``inner``. What has to see unscaled gradients, a clip above all, belongs inside.

    Args:
      inner: the optimizer, or a chain of all that sees unscaled gradients.
      loss_scale: `jmp.DynamicLossScale`, `jmp.StaticLossScale`, or `jmp.NoOpLossScale` for the mere
        guard, which is what bfloat16 and float32 need.
      max_loss_scale: where a dynamic scale stops growing; by default at 2^126.
      axis_name: names of mapped axes over which gradients are split, under `jax.pmap` or
        `jax.shard_map` without ``check_vma``. Elsewhere every shard is looked at anyway.

    Returns:
      A `optax.GradientTransformationExtraArgs`. `qstate.step` updates the parameters inside of the
      choice, in one pass where ``inner`` can.

    Raises:
      TypeError: if ``loss_scale`` is none of jmp's, or (in ``update``) if the state was cast.
      ValueError: for a scale, factor, period or minimum that cannot work.

    State:
      ``LossScaleState``: that of ``inner`` and four scalars. No second copy of the inner state is
      made by a step, skipped or not.

    Numerics:
      Gradients reach ``inner`` in float32, and its averages are float32 also where parameters have
      16 bits. Updates come out in what ``inner`` computes, mostly float32; those of a skipped step
      are -0.0, which leaves every number as it is, -0.0 too (but for subnormal ones, which CPUs
      flush to zero when anything is added).

    Example:
      >>> import jax, jax.numpy as jnp, jmp, optax, qstate
      >>> tx = qstate.with_loss_scale(
      ...     optax.chain(optax.clip_by_global_norm(1.0), qstate.adamw(1e-3)),
      ...     jmp.DynamicLossScale(jnp.float32(2**15)))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> def loss(params, state):
      ...     return qstate.loss_scale(state).scale(jnp.sum(params["w"] ** 2))
      >>> grads = jax.grad(loss)(params, state)
      >>> updates, state = tx.update(grads, state, params)
      >>> infinite = {"w": jnp.full((64, 128), jnp.inf)}
      >>> _, state = tx.update(infinite, state, params)
      >>> float(qstate.loss_scale(state).loss_scale), int(state.total_notfinite)
      (16384.0, 1)

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    inner = optax.with_extra_args_support(inner)
    scaler_of(loss_scale, max_loss_scale)  # refuses early what init would
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    watch = NarrowParametersWatch()

    def init_fn(params) -> Any:
        register_with_flax(Scaler, ("value", "counter"))
        of_others = waiting_warnings()
        inner_state = _init_wide(inner.init, params)
        call_off_warnings(but=of_others)  # those of inner: this one says it
        if not _carries_rounding(inner_state):
            watch.look_at(params)
        return LossScaleState(
            inner_state,
            scaler_of(loss_scale, max_loss_scale),
            notfinite_count=jnp.zeros([], jnp.int32),
            total_notfinite=jnp.zeros([], jnp.int32),
        )

    def guarded(scaled, state, commit, skip) -> Any:
        """What ``commit`` or ``skip`` return, and the state after it.

        Both take gradients, scaled or not, and the inner state, and return a result and the inner
        state.
        """
        watch.warn()
        check_dtype("the loss scale", state.scaler.value, jnp.float32)
        finite = _all_finite(state.scaler.unscale(scaled), axes)

        def unscaled(scaled, inner_state):
            # Unscaled once more: handed in, all of them would be in memory in float32.
            result, new = commit(state.scaler.unscale(scaled), inner_state)
            return result, _cast_like(new, inner_state)

        result, inner_state = _one_of(finite, unscaled, skip, scaled, state.inner_state)
        count, total = state.notfinite_count, state.total_notfinite
        return result, LossScaleState(
            inner_state,
            state.scaler.adjust(finite),
            jnp.where(finite, jnp.zeros_like(count), optax.safe_increment(count)),
            jnp.where(finite, total, optax.safe_increment(total)),
        )

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        def commit(gradients, inner_state):
            return inner.update(gradients, inner_state, params, **extra_args)

        def skip(scaled, inner_state):
            shapes, _ = jax.eval_shape(
                lambda g, s: commit(state.scaler.unscale(g), s), scaled, inner_state
            )
            return jax.tree.map(_nothing, shapes), inner_state

        return guarded(updates, state, commit, skip)

    def step_fn(grads, state, params, **extra_args) -> Any:
        return guarded(
            grads,
            state,
            lambda gradients, inner_state: step(
                inner, gradients, inner_state, params, **extra_args
            ),
            lambda scaled, inner_state: (params, inner_state),
        )

    return with_step(optax.GradientTransformationExtraArgs(init_fn, update_fn), step_fn)


def loss_scale(opt_state: Any) -> jmp.LossScale:
    """The jmp loss scale in an optimizer's state, to scale a loss with.

    Args:
      opt_state: the state of `with_loss_scale`, or any state that holds one.

    Returns:
      A `jmp.DynamicLossScale`, `jmp.StaticLossScale` or `jmp.NoOpLossScale`, its numbers in
      float32. To move it is the optimizer's business: ``adjust`` is not called.

    Raises:
      ValueError: where there is none, or more than one.

    Warns:
      Where links of a chain come before the loss scale and so see scaled gradients. Outside of
      `jax.jit`, where it waits for the numbers: where the scale is as small as it may be and every
      step is skipped.

    Example:
      >>> import jax.numpy as jnp, jmp, optax, qstate
      >>> tx = qstate.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(jnp.float32(2**15)))
      >>> scale = qstate.loss_scale(tx.init(jnp.ones(3)))
      >>> float(scale.scale(jnp.float32(2.0)))
      65536.0
    """
    found = find_loss_scales(opt_state)
    if len(found) != 1:
        held = "no loss scale" if not found else f"{len(found)} loss scales"
        raise ValueError(
            f"the state holds {held}; a loss has one: wrap the whole optimizer, "
            "qstate.with_loss_scale(tx, jmp.DynamicLossScale(jnp.float32(2.0**15))), and pass "
            "its state"
        )
    state = plain(found[0])
    advise_on_order(opt_state, found[0])
    advise_on_floor(opt_state, found[0], state)
    return state.scaler.as_jmp()


def find_loss_scales(opt_state: Any) -> list[LossScaleState]:
    """Every `LossScaleState` in a state."""
    found = find(opt_state, LossScaleState)
    return found + [inner for node in found for inner in find_loss_scales(node.inner_state)]


def plain(state: LossScaleState) -> LossScaleState:
    """A state whose numbers are arrays, also where `flax.nnx` holds each in an object."""
    numbers = jax.tree.leaves((state.scaler, state.notfinite_count, state.total_notfinite))
    value, counter, count, total = numbers
    scaler = Scaler(value, counter, state.scaler.settings)
    return LossScaleState(state.inner_state, scaler, count, total)


def _all_finite(gradients: Any, axes: tuple[str, ...]) -> jax.Array:
    """Whether every number of every leaf on every shard is finite, bool[]."""
    finite = jnp.array(True)
    for g in jax.tree.leaves(gradients):
        if is_inexact(g):
            finite &= jnp.all(jnp.isfinite(g))
    # Inside of shard_map a flag may differ between shards; its type says over which axes.
    axes = tuple(sorted({*axes, *jax.typeof(finite).manual_axis_type.varying}))
    return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite


def _one_of(
    finite: jax.Array,
    commit: Callable[..., Any],
    skip: Callable[..., Any],
    gradients: Any,
    inner_state: Any,
) -> Any:
    """What one of two functions of the gradients and the state returns.

    The choice is a branch, not a select: the state is updated in place, and nothing that a bad
    gradient led to is computed.
    """
    if isinstance(finite, jax.core.Tracer):
        return lax.cond(finite, commit, skip, gradients, inner_state)
    # Outside of a trace a branch would be compiled anew in every step.
    return (commit if finite else skip)(gradients, inner_state)


def _nothing(update: Any) -> jax.Array:
    """An update that leaves every number as it is: -0.0 + -0.0 is -0.0."""
    zero = -0.0 if jnp.issubdtype(update.dtype, jnp.inexact) else 0
    return filled(update, zero)


def _init_wide(init: Callable[[Any], Any], params: Any) -> Any:
    """An inner state as it is for float32 parameters.

    The inner transformation is given float32 gradients, so what it keeps would become float32 in
    the first step. Parts that treat narrow parameters on purpose stay as they are.
    """
    state = init(params)
    if not any(is_narrow(leaf) for leaf in jax.tree.leaves(params)):
        return state
    wide = init(jax.tree.map(in_float32, params))
    return jax.tree.map(lambda s, w: s if _is_whole(s) else w, state, wide, is_leaf=_is_whole)


def _is_whole(node: Any) -> bool:
    return is_average(node) or isinstance(node, MasterWeightsState)


def _carries_rounding(state: Any) -> bool:
    """Whether a state has something that keeps what 16-bit parameters round away."""
    return bool(find(state, MasterWeightsState) or find(state, StochasticRoundParamsState))


def _cast_like(new: Any, old: Any) -> Any:
    """A new inner state in the dtypes of the old one, so that both branches agree."""

    def cast(n, o):
        dtype = jnp.result_type(o)
        return n if jnp.result_type(n) == dtype else jnp.asarray(n).astype(dtype)

    return jax.tree.map(cast, new, old)
