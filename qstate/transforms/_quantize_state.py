"""Any optax transformation, its averages kept in few bits between its steps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qstate.numerics import Storage, key_words
from qstate.numerics import storage as recipe
from qstate.precision import NarrowParametersWatch
from qstate.state import (
    Average,
    Every,
    Exempt,
    Tick,
    dequantize_average,
    has_average,
    is_average,
    keep_averages,
    still,
    tick,
    zeros,
)
from qstate.transforms._advice import check_first_moment

SECOND_MOMENTS = frozenset({"nu", "nu_max", "n", "e_g", "e_x", "exp_avg_sq", "sum_of_squares"})
"""Fields of optax's states that hold averages of squares: they are stored without zero."""

ITERATES = frozenset(
    {"z", "x0", "params", "params0", "init_params", "init_particles", "step_sizes"}
)
"""Fields shaped like the parameters that are no averages: weights, and sizes of steps."""

COUNTS = frozenset({"count", "count_m2", "t"})
"""Fields that count an average's steps, for bias correction."""


class QuantizeState(NamedTuple):
    """State of `quantize_state`."""

    inner_state: Any  # the inner state, an `Average` in place of every field that is stored
    key: jax.Array  # uint32[2]


def quantize_state(
    inner: optax.GradientTransformation,
    storage: str | Storage | Mapping[str, Storage],
    *,
    reset: Every | None = None,
    key: Any = 0,
    exempt: Exempt | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of any optax transformation in few bits between its steps.

    Before a step the stored averages are read as float32, the inner transformation runs as it is,
    and what it returns is rounded and stored. Averages are the fields of its state that have the
    parameters' tree structure and shapes, wherever they lie; everything else is left as it is.

    Args:
      inner: a transformation or a whole optimizer.
      storage: how averages are held: a recipe's name, its second storage for averages of squares
        (``nu`` and its like) and its first for all others; one `Storage` for all; or a mapping from
        field names (``"mu"``, ``"nu"``, ``"trace"``...) to `Storage`, for those fields alone.
        Unless a
        mapping names it, ``z`` of schedule-free optimizers stays as it is: it holds weights.
      reset: None or ``qstate.every(period)``: every average to zero, and the step counts beside
        them, so that bias correction starts over too.
      key: seed of stochastic rounding: an integer or a JAX key.
      exempt: ``(path, leaf) -> bool``, which leaves stay float32; by default those of fewer than
        4096 elements. Paths are the parameters'.

    Returns:
      A `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError, ValueError: for a reset that would need a decay rate, an unsigned format for values
        of both signs, or (in ``init``) a mapping with a name that no field has.

    State:
      ``QuantizeState``: the inner state with averages in few bits, and a key. In a step all inner
      averages may be in float32 at once; `scale_by_adam` has one leaf at a time.

    Numerics:
      With ``qstate.Storage(qstate.F32)`` it equals the inner transformation bit for bit. Averages
      are float32 to the inner transformation, whatever the parameters' dtype.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> tx = qstate.quantize_state(optax.contrib.muon(2e-2), "fp8", reset=qstate.every(300))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
    """
    inner = optax.with_extra_args_support(inner)
    storage_of = _storage_of(storage)
    if not (reset is None or (isinstance(reset, Every) and reset.kind == "hard")):
        raise TypeError(
            "the wrapper does not know the inner decay rates, which soft, adaptive and theory-"
            f"timed resets need (got {reset!r}): use qstate.every(period), with a period from "
            "qstate.theory.reset_period(format, decay), or qstate.scale_by_adam"
        )

    watch = NarrowParametersWatch()

    def init_fn(params) -> Any:
        watch.look_at(params)
        found = []

        def store(name, field):
            held = storage_of(name)
            if held is None:
                return field
            found.append(name)
            return _Fresh(field, zeros(field, held, exempt=exempt, others=True))

        state = _map_averages(store, inner.init(params), params)
        _check_names(storage, found)
        return _keep(state, key_words(key), still)

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        watch.warn()
        stored, treedef = jax.tree.flatten(state.inner_state, is_leaf=is_average)
        read = treedef.unflatten(dequantize_average(s) if is_average(s) else s for s in stored)
        gradients = updates
        updates, new = inner.update(gradients, read, params, **extra_args)
        # Float32 averages must not widen the updates of 16-bit parameters.
        updates = jax.tree.map(
            lambda u, g: u.astype(g.dtype) if has_average(u) and has_average(g) else u,
            updates,
            gradients,
        )
        new = treedef.unflatten(
            _Fresh(value, s) if is_average(s) else value
            for value, s in zip(treedef.flatten_up_to(new), stored, strict=True)
        )
        # The inner transformation corrects its own bias: of the clock only the age counts here.
        return updates, _keep(new, state.key, lambda average: tick(average, 0.0, reset))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Fresh:
    """New values, and the average that is to hold them."""

    def __init__(self, values: Any, average: Average):
        self.values = jax.tree.map(lambda x: x.astype(jnp.float32) if has_average(x) else x, values)
        self.average = average


def _keep(state: Any, key: jax.Array, clock: Callable[[Average], Tick]) -> QuantizeState:
    """Stores every fresh average of an inner state, and resets the counts beside those due."""
    is_fresh = lambda node: isinstance(node, _Fresh)  # noqa: E731
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_fresh)
    fresh = [leaf for leaf in leaves if is_fresh(leaf)]
    ticks = [clock(f.average) for f in fresh]
    kept, key = keep_averages(
        [f.values for f in fresh],
        [f.average for f in fresh],
        ticks,
        key,
    )
    averages = iter(kept)
    state = treedef.unflatten(next(averages) if is_fresh(leaf) else leaf for leaf in leaves)
    due = next((t.due for t in ticks if t.due is not None), None)
    return QuantizeState(state if due is None else _reset_counts(state, due), key)


def _map_averages(fn: Callable[[str, Any], Any], state: Any, params: Any, name: str = "") -> Any:
    """``fn(field name, field)`` for every field of a state that is shaped like the parameters."""
    if name and _like(state, params):
        return fn(name, state)
    children, treedef = _children(state)
    if children is None:
        return state
    return treedef.unflatten(_map_averages(fn, child, params, key) for key, child in children)


def _reset_counts(state: Any, due: jax.Array) -> Any:
    """Step counts beside an average start over with it."""
    children, treedef = _children(state)
    if children is None or is_average(state):
        return state
    if any(is_average(child) for _, child in children):
        return treedef.unflatten(
            jnp.where(due, jnp.zeros_like(child), child) if name in COUNTS else child
            for name, child in children
        )
    return treedef.unflatten(_reset_counts(child, due) for _, child in children)


def _children(node: Any) -> tuple[list[tuple[str, Any]] | None, Any]:
    """The children of a tree's node with their field names (``""`` for no field), or None."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if jax.tree_util.treedef_is_leaf(treedef):
        return None, treedef
    return [(getattr(path[0], "name", ""), child) for path, child in pairs], treedef


def _like(field: Any, params: Any) -> bool:
    """Whether a state's field holds an array like each parameter, or nothing in its place."""
    leaves, treedef = jax.tree.flatten(params)
    try:
        parts = treedef.flatten_up_to(field)
    except (ValueError, TypeError):
        return False
    arrays = [
        (part, leaf) for part, leaf in zip(parts, leaves, strict=True) if jax.tree.leaves(part)
    ]
    return any(has_average(leaf) for _, leaf in arrays) and all(
        getattr(part, "shape", None) == leaf.shape and has_average(part) == has_average(leaf)
        for part, leaf in arrays
    )


def _storage_of(storage: str | Storage | Mapping[str, Storage]) -> Callable[[str], Storage | None]:
    """What a field of that name is held in; None to leave it as it is."""
    if isinstance(storage, str):
        first, second = recipe(storage)
    elif isinstance(storage, Storage):
        first = second = storage
    elif isinstance(storage, Mapping) and all(isinstance(s, Storage) for s in storage.values()):
        first = second = None
    else:
        raise TypeError(
            'storage is a recipe\'s name such as "fp8", a qstate.Storage, or a mapping from field '
            f"names to qstate.Storage; got {storage!r}"
        )

    def of(name: str) -> Storage | None:
        if isinstance(storage, Mapping):
            held = storage.get(name)
        else:
            held = None if name in ITERATES else second if name in SECOND_MOMENTS else first
        if held is None or held.exact:
            return held
        if name in SECOND_MOMENTS:
            return held.without_zero()
        check_first_moment(held, f"the field {name!r}")
        return held

    return of


def _check_names(storage: Any, found: list[str]) -> None:
    if isinstance(storage, Mapping) and set(storage) - set(found):
        missing = ", ".join(sorted(set(storage) - set(found)))
        raise ValueError(
            f"no field of the state that is shaped like the parameters is named {missing}; "
            f"found: {', '.join(sorted(set(found))) or 'none of the names given'}"
        )
