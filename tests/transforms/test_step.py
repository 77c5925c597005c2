"""`qstate.step`: the two calls of optax, in one pass where there is one."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate

STORAGES = ["fp32", "bf16", "fp8", "fp4", "int8", "int4"]
SHAPES = {"matrix": (64, 256), "tail": (40, 300), "small": (7,)}


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}
    return {**params, "nothing": None, "integers": jnp.arange(3)}


def gradients(params, seed):
    rng = np.random.default_rng(seed)

    def gradient(p):
        if jnp.issubdtype(p.dtype, jnp.integer):
            return np.zeros(p.shape, jax.dtypes.float0)
        return jnp.asarray(rng.normal(size=p.shape), p.dtype)

    return jax.tree.map(gradient, params)


def two_calls(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def one_call(tx):
    return lambda grads, state, params: qstate.step(tx, grads, state, params)


def train(step, tx, params, steps=5, gradients=gradients):
    state, step = tx.init(params), jax.jit(step)
    for seed in range(steps):
        params, state = step(gradients(params, seed), state, params)
    return params, state


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("storage", STORAGES)
def test_adamw_steps_to_the_same_bits(storage):
    tx = qstate.adamw(1e-2, weight_decay=0.1, storage=storage)
    params = parameters()
    assert_same(train(one_call(tx), tx, params), train(two_calls(tx), tx, params))


@pytest.mark.parametrize("storage", ["fp32", "fp8"])
@pytest.mark.parametrize(
    "tx_of",
    [
        lambda s: qstate.adam(optax.linear_schedule(1e-2, 1e-3, 5), storage=s),
        lambda s: qstate.adam(1e-2, storage=s, reset=qstate.every(2), nesterov=True),
        lambda s: qstate.adam(
            1e-2, eps_root=1e-3, storage=s, reset=(None, qstate.every(3, "soft"))
        ),
        lambda s: qstate.adamw(1e-2, weight_decay=optax.constant_schedule(0.1), storage=s),
        lambda s: qstate.adamw(1e-2, weight_decay=0.0, storage=s),
        lambda s: qstate.adamw(
            1e-2,
            weight_decay=0.1,
            storage=s,
            mask=lambda params: {k: k == "matrix" for k in params if params[k] is not None},
        ),
    ],
    ids=["schedule", "reset-nesterov", "soft-root", "decay-schedule", "no-decay", "mask"],
)
def test_adams_settings_step_to_the_same_bits(tx_of, storage):
    tx = tx_of(storage)
    params = {k: v for k, v in parameters().items() if k in SHAPES}
    one, two = train(one_call(tx), tx, params), train(two_calls(tx), tx, params)
    assert_same(one, two)


def test_a_prefix_of_a_mask_decays_what_is_below_it():
    tx = qstate.adamw(1e-2, weight_decay=0.5, mask={"layers": True, "norms": False})
    leaves = {k: v for k, v in parameters().items() if k in SHAPES}
    params = {"layers": leaves, "norms": leaves}
    one, two = train(one_call(tx), tx, params), train(two_calls(tx), tx, params)
    assert_same(one, two)
    assert (np.asarray(one[0]["layers"]["matrix"]) != np.asarray(one[0]["norms"]["matrix"])).any()


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), qstate.adamw(1e-2)),
        qstate.quantize_state(optax.lion(1e-2), "fp8"),
    ],
    ids=["sgd", "adamw", "chain", "quantize_state"],
)
def test_any_transformation_steps(tx):
    params = {k: v for k, v in parameters().items() if k in SHAPES}
    assert_same(train(one_call(tx), tx, params), train(two_calls(tx), tx, params))


def test_extra_arguments_are_passed_on():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = jnp.ones(3)
    for tx in (inner, qstate.with_master_weights(inner)):
        qstate.step(tx, params, tx.init(params), params, value=3)
    assert seen == [3, 3]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("remainder", [None, 16, 8], ids=["float32", "16", "8"])
def test_parameters_land_on_their_masters_cast(remainder, dtype):
    tx = qstate.with_master_weights(qstate.adamw(1e-2), remainder=remainder)
    params = {k: v for k, v in parameters(dtype).items() if k in SHAPES}
    landed, state = train(one_call(tx), tx, params)
    masters = qstate.master_params(state, landed)
    expected, other = train(two_calls(tx), tx, params)
    for k, p in landed.items():
        assert p.dtype == dtype
        if remainder is None:
            assert np.asarray(p).tobytes() == np.asarray(masters[k].astype(dtype)).tobytes()
        # The two calls round an update that the one call does not.
        np.testing.assert_allclose(masters[k], qstate.master_params(other, expected)[k], atol=1e-4)
    assert jax.tree.structure(state) == jax.tree.structure(other)


def test_a_skipped_step_changes_nothing_but_the_scale():
    tx = qstate.with_loss_scale(
        qstate.with_master_weights(qstate.adamw(1e-2)), jmp.DynamicLossScale(jnp.float32(1024.0))
    )
    params = {k: v for k, v in parameters(jnp.bfloat16).items() if k in SHAPES}
    params, state = train(one_call(tx), tx, params, steps=2)
    bad = jax.tree.map(lambda p: jnp.full(p.shape, jnp.inf, p.dtype), params)
    after, skipped = jax.jit(one_call(tx))(bad, state, params)
    assert_same((after, skipped.inner_state), (params, state.inner_state))
    assert (int(skipped.total_notfinite), float(skipped.scaler.value)) == (1, 512.0)


def test_a_guarded_step_is_the_unguarded_one():
    tx = qstate.adamw(1e-2)
    guarded = qstate.with_loss_scale(tx, jmp.DynamicLossScale(jnp.float32(1024.0)))
    params = {k: v for k, v in parameters().items() if k in SHAPES}
    scaled = lambda p, seed: jax.tree.map(lambda g: g * 1024.0, gradients(p, seed))  # noqa: E731
    one, state = train(one_call(guarded), guarded, params, gradients=scaled)
    two, bare = train(one_call(tx), tx, params)
    for a, b in zip(*map(jax.tree.leaves, ((one, state.inner_state), (two, bare))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)  # exact leaves contract unlike sums


@pytest.mark.parametrize("storage", ["fp8", "fp4", "bf16"])
def test_a_step_needs_no_second_state_and_no_updates(storage):
    """Temporaries: none of a leaf's size, but for 4 bits the codes one to a byte."""
    side, leaves = 512, 4
    tx = qstate.adamw(1e-3, storage=storage)
    params = {str(i): jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(leaves)}
    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(one_call(tx), donate_argnums=(1, 2)).lower(params, state, params).compile()
    memory, leaf = compiled.memory_analysis(), 4 * side * side
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < (0.8 if storage == "fp4" else 0.1) * leaf
