"""The guard around a step: no second copy of the state, and nothing sent to the host."""

import functools

import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import qstate

LEAVES, SIDE = 6, 256

OPTIMIZERS = {
    "qstate-fp8": lambda: qstate.adamw(1e-3, storage="fp8", reset=qstate.every(3)),
    "qstate-fp4": lambda: qstate.adamw(1e-3, storage="fp4"),
    "optax": lambda: optax.adamw(1e-3),
}
optimizers = pytest.mark.parametrize(
    "name", ["qstate-fp8", pytest.param("qstate-fp4", marks=pytest.mark.slow), "optax"]
)


def wrapped(inner):
    return qstate.with_loss_scale(inner, jmp.DynamicLossScale(jnp.float32(2.0**15)))


def shapes(dtype=jnp.float32):
    return {str(i): jax.ShapeDtypeStruct((SIDE, SIDE), dtype) for i in range(LEAVES)}


def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def compiled(name, guarded=True, gradient_dtype=jnp.float32):
    """A donated step, and the shapes of parameters and state."""
    tx = wrapped(OPTIMIZERS[name]()) if guarded else OPTIMIZERS[name]()

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    donated = shapes(), jax.eval_shape(tx.init, shapes())
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*donated, shapes(gradient_dtype))
    return lowered.compile(), donated


@optimizers
def test_parameters_and_state_are_updated_in_place(name):
    executable, donated = compiled(name)
    assert executable.memory_analysis().alias_size_in_bytes == size(donated)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["f32", "f16"])
@optimizers
def test_the_guard_takes_no_more_than_the_updates(name, dtype):
    """Which leave a branch, so they are in memory all at once: 4 bytes a parameter.

    Beside them, of one leaf at a time, its unscaled gradient, its direction, and in 4 bits its
    codes one to a byte.
    """
    guarded, (params, state) = compiled(name, True, dtype)
    one_leaf = 4 * SIDE * SIDE
    beside = {"qstate-fp8": 2.1, "qstate-fp4": 2.65, "optax": 0.1}[name] * one_leaf
    assert size(state) > one_leaf  # a second copy of it could not hide below
    assert guarded.memory_analysis().temp_size_in_bytes <= size(params) + beside


@optimizers
def test_nothing_is_sent_to_the_host(name):
    executable, donated = compiled(name)
    tx = wrapped(OPTIMIZERS[name]())
    text = executable.as_text() + str(jax.make_jaxpr(tx.update)(shapes(), donated[1], donated[0]))
    for word in ("callback", "infeed", "outfeed"):
        assert word not in text


@pytest.mark.parametrize("name", ["qstate-fp8", "optax"])
def test_steps_run_where_no_transfer_is_allowed(name):
    tx = wrapped(OPTIMIZERS[name]())
    params = {"w": jnp.ones((SIDE, SIDE))}
    good, bad = {"w": params["w"] * 2.0**15}, {"w": params["w"] * jnp.inf}
    state = tx.init(params)

    @jax.jit
    def step(params, state, gradients):
        scale = qstate.loss_scale(state)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, scale.loss_scale

    step(params, state, good)
    with jax.transfer_guard("disallow"):
        for gradients in (good, bad, good):
            params, state, _ = step(params, state, gradients)
    assert int(state.total_notfinite) == 1


def test_the_scale_is_read_where_no_transfer_is_allowed():
    state = wrapped(optax.sgd(1.0)).init(jnp.ones(3))
    with jax.transfer_guard("disallow"):
        qstate.loss_scale(state)


# What `init` returns may be donated.


def donated_step(tx):
    return jax.jit(lambda g, state, params: tx.update(g, state, params), donate_argnums=1)


def test_the_first_step_may_donate_the_state():
    tx = wrapped(optax.adam(1e-3))
    params = jnp.ones(3)
    _, state = donated_step(tx)(params, tx.init(params), params)
    assert int(state.scaler.counter) == 1


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp.DynamicLossScale(jnp.float32(8.0), counter=jnp.int32(1)),
        jmp.StaticLossScale(jnp.float32(8.0)),
        jmp.StaticLossScale(8.0),
        jmp.NoOpLossScale(),
    ],
    ids=["dynamic", "static", "python-number", "none"],
)
def test_a_donated_state_takes_nothing_of_the_callers_with_it(loss_scale):
    tx = qstate.with_loss_scale(optax.adam(1e-3), loss_scale)
    params = jnp.ones(3)
    for _ in range(2):
        _, state = donated_step(tx)(params, tx.init(params), params)
        assert int(state.notfinite_count) == 0
    jax.block_until_ready((loss_scale.loss_scale, getattr(loss_scale, "counter", 0)))
