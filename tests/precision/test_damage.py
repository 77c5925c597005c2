"""A policy's cast over an optimizer's state: nothing of it is used, an error says so.

What a dtype cannot tell is not covered: scales that were cast to 16 bits and back, and states that
are not of this package, which may have any dtype (those of plain optax transformations, alone, in a
chain, as fields that a mapping of `quantize_state` leaves out, and inside of `with_loss_scale` or
`with_master_weights`).
"""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

RECIPES = ("fp32", "bf16", "fp8", "fp4", "int8", "int4")
CASTS = {
    "compute-bfloat16": jmp.get_policy("params=float32,compute=bfloat16").cast_to_compute,
    "compute-float16": jmp.get_policy("params=float32,compute=float16").cast_to_compute,
    "param-bfloat16": jmp.get_policy("params=bfloat16,compute=bfloat16").cast_to_param,
    "output-float16": jmp.get_policy("p=float32,c=float32,o=float16").cast_to_output,
    "half": jmp.cast_to_half,
}
WIDENING = {
    "full": jmp.cast_to_full,
    "param-float32": jmp.get_policy("params=float32,compute=bfloat16").cast_to_param,
}
ERROR = (
    r"in the optimizer's state is (\w+) and has to be (\w+): cast parameters and inputs with a jmp"
)


def _pair(scaling):
    return (qstate.Storage(qstate.E4M3, scaling, "stochastic"),) * 2


STATES = {
    **{f"adamw-{name}": lambda name=name: qstate.adamw(1e-3, storage=name) for name in RECIPES},
    "bfloat16-scales": lambda: qstate.adamw(1e-3, storage=_pair(qstate.Block(128, "bfloat16"))),
    "power-of-two": lambda: qstate.adamw(1e-3, storage=_pair(qstate.Block(128, "power_of_two"))),
    "per-tensor": lambda: qstate.adamw(1e-3, storage=_pair(qstate.PerTensor())),
    "delayed": lambda: qstate.adamw(1e-3, storage=_pair(qstate.Delayed(4))),
    "rank-1": lambda: qstate.adamw(1e-3, storage=_pair(qstate.Rank1())),
    "adaptive": lambda: qstate.adamw(1e-3, reset=qstate.adaptive()),
    "quantize_state-fp8": lambda: qstate.quantize_state(optax.adam(1e-3), "fp8"),
    "quantize_state-fp32": lambda: qstate.quantize_state(optax.adam(1e-3), "fp32"),
    "loss-scale": lambda: qstate.with_loss_scale(
        optax.sgd(1e-3), jmp.DynamicLossScale(jnp.float32(2**10))
    ),
    "loss-scale-adamw": lambda: qstate.with_loss_scale(qstate.adamw(1e-3), jmp.NoOpLossScale()),
    "master-weights": lambda: qstate.with_master_weights(optax.sgd(1e-3)),
    "master-weights-adamw": lambda: qstate.with_master_weights(qstate.adamw(1e-3), 8),
}


@pytest.fixture(scope="module")
def params():
    """A leaf that is quantized, one that is too small to be, and gradients to go with them."""
    draw = np.random.default_rng(0).normal
    return {"b": jnp.asarray(draw(size=7), jnp.float32), "w": jnp.asarray(draw(size=(64, 128)))}


def _narrow(params):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


@pytest.fixture(scope="module", params=STATES.items(), ids=STATES.keys())
def optimizer(request, params):
    """A transformation, its state, and parameters."""
    name, make = request.param
    tx, p = make(), _narrow(params) if "master" in name else params
    return tx, tx.init(p), p


def _bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_a_state_that_was_cast_is_refused(cast, optimizer):
    tx, state, p = optimizer
    damaged = cast(state)
    assert _bits(damaged) != _bits(state)
    for step in (tx.update, jax.jit(tx.update)):
        with pytest.raises(TypeError, match=ERROR):
            step(p, damaged, p)


def test_every_array_that_was_cast_is_found_alone(optimizer):
    """Codes of a floating dtype, scales, exact leaves, masses, master weights."""
    tx, state, p = optimizer
    pairs, treedef = jax.tree.flatten_with_path(state)
    leaves = [leaf for _, leaf in pairs]
    floating = [
        i
        for i, (path, leaf) in enumerate(pairs)
        # What an adaptive reset has measured lies beside a mass, and is no number of a state's.
        if _is_float(leaf) and "monitor" not in jax.tree_util.keystr(path)
    ]
    assert floating
    for i in floating:
        for dtype in {jnp.dtype(d) for d in ("float16", "bfloat16", "float32")} - {leaves[i].dtype}:
            damaged = treedef.unflatten([*leaves[:i], leaves[i].astype(dtype), *leaves[i + 1 :]])
            with pytest.raises(TypeError, match=ERROR) as error:
                jax.eval_shape(tx.update, p, damaged, p)
            message = str(error.value)
            assert f"is {dtype} and has to be {leaves[i].dtype}" in message


@pytest.mark.parametrize("cast", WIDENING.values(), ids=WIDENING.keys())
def test_a_cast_to_float32_is_refused_where_it_changes_anything(cast, optimizer):
    tx, state, p = optimizer
    damaged = cast(state)
    if any(_is_float(leaf) and leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(state)):
        with pytest.raises(TypeError, match=ERROR):
            tx.update(p, damaged, p)
    else:
        assert _bits(damaged) == _bits(state)
        jax.eval_shape(tx.update, p, damaged, p)


@pytest.mark.parametrize("cast", [*CASTS.values(), *WIDENING.values()], ids=[*CASTS, *WIDENING])
@pytest.mark.parametrize("remainder", [16, 8])
def test_remainders_and_keys_are_no_floats_and_pass_as_they_are(cast, remainder, params):
    tx = qstate.with_master_weights(
        optax.chain(optax.sgd(1e-3), qstate.stochastic_round_params(0)), remainder
    )
    p = _narrow(params)
    state = tx.init(p)
    assert _bits(cast(state)) == _bits(state)
    assert not any(_is_float(leaf) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_what_a_policy_is_for_is_not_refused(cast, params):
    """Parameters and gradients in 16 bits, the state as it is."""
    tx = qstate.with_master_weights(qstate.adamw(1e-3))
    p = cast(params)
    state = tx.init(p)
    _, after = jax.jit(tx.update)(cast(params), state, p)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [
        leaf.dtype for leaf in jax.tree.leaves(state)
    ]
