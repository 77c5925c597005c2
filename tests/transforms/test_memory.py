"""What a state takes in bytes, and what a step takes while it runs."""

import jax
import jax.numpy as jnp
import optax
import pytest

import qstate

DIM, HIDDEN, VOCABULARY, LAYERS = 256, 688, 16384, 7


def _llama():
    """The shapes of a LLaMA-like model of 10 million parameters."""
    layer = {
        "attention": dict.fromkeys(("k", "o", "q", "v"), (DIM, DIM)),
        "feed_forward": {"down": (HIDDEN, DIM), "gate": (DIM, HIDDEN), "up": (DIM, HIDDEN)},
        "norm_attention": (DIM,),
        "norm_feed_forward": (DIM,),
    }
    shapes = {
        "embedding": (VOCABULARY, DIM),
        "layers": [layer] * LAYERS,
        "norm": (DIM,),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize(
    ("storage", "most"),
    [
        ("fp32", 8.0001),
        ("bf16", 4.01),
        ("fp8", 2.07),
        ("int8", 2.04),
        ("fp4", 1.07),
        ("int4", 1.06),
    ],
)
def test_bytes_a_parameter_of_a_model(storage, most):
    params = _llama()
    size = sum(p.size for p in jax.tree.leaves(params))
    assert 9.5e6 < size < 10.5e6
    state = jax.eval_shape(qstate.adamw(1e-3, storage=storage).init, params)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert qstate.nbytes(state) == held
    assert most - 0.05 < held / size <= most


@pytest.mark.parametrize("storage", ["fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("shape", [(16, 4096), (4096, 16)], ids=str)
def test_both_of_a_lora_pair_are_quantized(storage, shape):
    bits = {"fp8": 8, "fp4": 4, "int8": 8, "int4": 4}[storage]
    size = shape[0] * shape[1]
    for average in qstate.adamw(1e-3, storage=storage).init({"w": jnp.zeros(shape)})[0][1:3]:
        assert average.codes["w"].nbytes == size * bits / 8
        scales = sum(s.nbytes for s in jax.tree.leaves(average.scales))
        assert 0 < scales / size < 0.3


def test_four_bit_codes_are_packed():
    mu = qstate.adamw(1e-3, storage="fp4", exempt=lambda p, leaf: False).init(jnp.zeros(1024))[0].mu
    assert (mu.codes.nbytes, mu.scales.nbytes) == (512, 1024 / 128 * 4)


def _temporary(storage, leaves, side=512):
    """Bytes of temporaries of a donated step on square leaves, in units of one leaf."""
    tx = qstate.adamw(1e-3, storage=storage)

    def step(p, state, g):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    params = {str(i): jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(leaves)}
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        params, jax.eval_shape(tx.init, params), params
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes / (4 * side * side)


def test_a_donated_step_updates_the_state_in_place():
    tx = qstate.adamw(1e-3, storage="fp8")
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(tx.update, donate_argnums=1).lower(params, state, params).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * qstate.nbytes(state)


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(name, marks=[] if name in ("fp8", "fp4") else [pytest.mark.slow])
        for name in ("fp32", "bf16", "fp8", "fp4", "int8", "int4")
    ],
)
def test_temporaries_do_not_grow_with_the_number_of_leaves(storage):
    few, many = _temporary(storage, 2), _temporary(storage, 8)
    assert many < few + 1.5
