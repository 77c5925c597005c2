"""Weights in 16 bits for the forward pass, and in float32 for the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qstate.precision._dtypes import in_float32, is_narrow
from qstate.precision._find import find
from qstate.precision._landing import equal, sum_of, update_to
from qstate.precision._remainder import REMAINDER_BITS, join, remainder_of, split
from qstate.state import check_dtype, path_name, step, with_step


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    What is kept is named after its layout, so that a checkpoint of another one does not fit.
    """

    inner_state: Any
    master: dict[str, Any]  # {"float32" or such as "bfloat16_remainder8": a tree of the parameters}


def with_master_weights(
    inner: optax.GradientTransformation, remainder: int | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Lets an optimizer step in float32 while the parameters have 16 bits.

    .. math::
       w \leftarrow w + \mathrm{inner}(g, w), \qquad
       p \leftarrow \mathrm{cast}_{16}(w)

    The optimizer sees float32 gradients and the float32 weights :math:`w`, also for weight decay;
    the update that comes out makes `optax.apply_updates` end exactly on the cast. Parameters that
    are float32 already are their own master weights and take no memory.

    Args:
      inner: the optimizer.
      remainder: None to keep :math:`w` in float32; 16 or 8 to keep what the cast left out of it in
        so many bits, beside the parameter itself.

    Returns:
      A `optax.GradientTransformationExtraArgs`. Its ``update`` needs ``params``.

    Raises:
      ValueError: for another ``remainder``, for parameters in 8 bits, or (in ``update``) without
        ``params``, or with ones whose dtype is not that in ``init``, where what is kept depends on
        it.
      TypeError: in ``update``, if the state was cast to another dtype.

    State:
      ``MasterWeightsState``: that of ``inner``, for float32 weights. Bytes a 16-bit parameter, with
      the parameter itself: 6 in float32, 4 with a remainder of 16 bits, 3 with one of 8.

    Numerics:
      A remainder of 16 bits beside bfloat16 is float32 to the last bit, and casts exact ties away
      from zero. One of 8 bits is within 2^-16, rounded to nearest. Beside float16, 16 bits hold all
      of a float32 number between 2^-16 and 65520, 8 bits are within 2^-19 above 2^-14; below, they
      have steps of 2^-40 and 2^-32. If a weight falls by more than some 2^16 in one step (2^13 in
      float16), float32 has no update that would end on its cast: the weight then takes the nearest
      value that has one, which differs by less than the last bit of what the weight was. A float16
      parameter whose weight passes 65504 is infinite, and no update leads back.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> tx = qstate.with_master_weights(optax.sgd(1.0))
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(4):
      ...     updates, state = tx.update(jnp.full(3, 0.001, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params[0].item(), round(qstate.master_params(state)[0].item(), 4)
      (0.99609375, 0.996)

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    if remainder is not None and (type(remainder) is not int or remainder not in REMAINDER_BITS):
        raise ValueError(
            f"remainder is None (float32 master weights), 16 or 8 bits; got {remainder!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params) -> Any:
        _refuse_eight_bits(params)
        leaves, treedef = jax.tree.flatten(params)
        wide = [in_float32(p) for p in leaves]
        kept = [
            _kept(p, w, remainder) if is_narrow(p) else None
            for p, w in zip(leaves, wide, strict=True)
        ]
        inner_state = inner.init(treedef.unflatten(wide))
        return MasterWeightsState(inner_state, _named(leaves, kept, treedef, remainder))

    def step_fn(grads, state, params, **extra_args) -> Any:
        weights = _weights(state, params, remainder)
        weights, inner_state = step(
            inner, jax.tree.map(in_float32, grads), state.inner_state, weights, **extra_args
        )
        leaves, treedef = jax.tree.flatten(params)
        landed = [
            _landed(p, w, remainder) if is_narrow(p) else (w, None)
            for p, w in zip(leaves, treedef.flatten_up_to(weights), strict=True)
        ]
        master = _named(leaves, [kept for _, kept in landed], treedef, remainder)
        return treedef.unflatten(p for p, _ in landed), MasterWeightsState(inner_state, master)

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        if params is None:
            raise ValueError(
                "with_master_weights needs the parameters: tx.update(grads, state, params)"
            )
        weights = _weights(state, params, remainder)
        updates = jax.tree.map(in_float32, updates)
        updates, inner_state = inner.update(updates, state.inner_state, weights, **extra_args)
        treedef = jax.tree.structure(params)
        columns = [treedef.flatten_up_to(tree) for tree in (params, weights, updates)]
        emitted, kept = [], []
        for p, w, u in zip(*columns, strict=True):
            if is_narrow(p):
                u, k = _step(p, w, u, remainder)
            else:
                k = None
            emitted.append(u)
            kept.append(k)
        master = _named(columns[0], kept, treedef, remainder)
        return treedef.unflatten(emitted), MasterWeightsState(inner_state, master)

    return with_step(optax.GradientTransformationExtraArgs(init_fn, update_fn), step_fn)


def master_params(opt_state: Any, params: Any = None) -> Any:
    """The float32 weights in an optimizer's state.

    Args:
      opt_state: the state of `with_master_weights`, or any state that holds one.
      params: the parameters that belong to it. Needed where weights are kept as remainders, and
        where some parameters are float32 and so their own master weights.

    Returns:
      A tree like the parameters, float32 in place of 16 bits.

    Raises:
      ValueError: where there are no master weights, or the parameters are needed.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> tx = qstate.with_master_weights(optax.sgd(0.1), remainder=16)
      >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
      >>> qstate.master_params(tx.init(params), params)["w"].dtype
      dtype('float32')
    """
    found = find(opt_state, MasterWeightsState)
    if len(found) != 1:
        held = "no master weights" if not found else f"{len(found)} sets of master weights"
        raise ValueError(
            f"the state holds {held}: pass the state of qstate.with_master_weights(tx)"
        )
    if params is not None:
        return _weights(found[0], params, _remainder_in(found[0]))
    tree = found[0].master.get("float32")
    if tree is None or any(w is None for w in jax.tree.leaves(tree, is_leaf=_is_none)):
        what = "only what 16 bits leave out" if tree is None else "no copy of float32 ones"
        raise ValueError(
            f"the state holds {what} of the weights: qstate.master_params(opt_state, params)"
        )
    return tree


def _landed(p: jax.Array, w: jax.Array, remainder: int | None) -> tuple[jax.Array, jax.Array]:
    """A parameter in its dtype, for a weight, and what is kept beside it."""
    return (w.astype(p.dtype), w) if remainder is None else split(w, p.dtype, remainder)


def _step(p: jax.Array, w: jax.Array, u: jax.Array, remainder: int | None) -> tuple[Any, Any]:
    """One weight's step: what is emitted, and what is kept."""
    u = u.astype(jnp.float32)
    w = jnp.where(u == 0, w, w + u)  # a weight of -0.0 stays what it is
    target = w.astype(p.dtype) if remainder is None else split(w, p.dtype, remainder)[0]
    emitted = update_to(p, target)
    landed, total = sum_of(p, emitted)
    w = jnp.where(equal(landed, target), w, total)
    return emitted, w if remainder is None else remainder_of(w, landed, remainder)


def _named(leaves: list[Any], kept: list[Any], treedef: Any, remainder: int | None) -> Any:
    """What is kept, a tree for every layout that occurs."""
    names = {_layout(p.dtype, remainder) for p in leaves if is_narrow(p)}
    return {
        name: treedef.unflatten(
            k if is_narrow(p) and _layout(p.dtype, remainder) == name else None
            for p, k in zip(leaves, kept, strict=True)
        )
        for name in sorted(names)
    }


def _kept(p: jax.Array, w: jax.Array, remainder: int | None) -> jax.Array:
    """What is kept of a weight beside the parameter that it was cast to."""
    if remainder is not None:
        return remainder_of(w, p, remainder)
    return jnp.array(w, copy=True)  # the inner state may hold it too, and be donated


def _layout(dtype: Any, remainder: int | None) -> str:
    """A name for what has to agree for a kept weight to be read."""
    return "float32" if remainder is None else f"{dtype}_remainder{remainder}"


def _weights(state: MasterWeightsState, params: Any, remainder: int | None) -> Any:
    """The float32 weights that a state and the parameters stand for."""
    # Leaf by leaf: `flax.nnx` holds the arrays of parameters and of a state in unlike nodes.
    pairs, treedef = jax.tree.flatten_with_path(params, is_leaf=_is_none)
    trees = {name: jax.tree.leaves(tree, is_leaf=_is_none) for name, tree in state.master.items()}

    def weight(i, path, p):
        held = {name: leaves[i] for name, leaves in trees.items() if leaves[i] is not None}
        name = _layout(p.dtype, remainder) if is_narrow(p) else None
        if set(held) != ({name} - {None}):
            raise ValueError(
                f"the state holds {', '.join(held) or 'no master weights'} for "
                f"{path_name(path)!r}, which is {p.dtype}: initialise it with parameters in the "
                "dtypes that they are trained in"
            )
        if name is None:
            return p
        dtype = {None: jnp.float32, 16: jnp.int16, 8: jnp.int8}[remainder]
        check_dtype(f"a master weight ({name})", held[name], dtype)
        return held[name] if remainder is None else join(p, held[name])

    return treedef.unflatten(
        p if p is None else weight(i, path, p) for i, (path, p) in enumerate(pairs)
    )


def _remainder_in(state: MasterWeightsState) -> int | None:
    """How many bits a state's remainders have, None where it holds float32 weights."""
    return next(
        (b for b in REMAINDER_BITS for n in state.master if n.endswith(f"remainder{b}")), None
    )


def _is_none(x: Any) -> bool:
    return x is None


def _refuse_eight_bits(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if is_narrow(leaf) and leaf.dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"{path_name(path)!r} is {leaf.dtype}; master weights are kept for bfloat16 and "
                "float16 parameters: cast it, params.astype(jnp.bfloat16)"
            )
