"""Numbers out of transformations that are wrapped, looped, batched or donated.

For one line of the table of each kind: what the others could do differently is traced in
`test_structure` and `test_wrappers`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate

TRANSFORMATIONS = {
    "adamw-fp8-hard": lambda: qstate.adamw(1e-2, storage="fp8", reset=(qstate.every(3),) * 2),
    "quantize_state-int4": lambda: qstate.quantize_state(optax.adam(1e-2), "int4"),
    "adamw-fp4-soft": lambda: qstate.adamw(
        1e-2, storage="fp4", reset=qstate.every(3, kind="soft"), exempt=lambda path, leaf: False
    ),
}
SLOW = ("adamw-fp4-soft",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in TRANSFORMATIONS
    ],
)
def tx(request):
    return TRANSFORMATIONS[request.param]()


@pytest.fixture(scope="module")
def plain(tx, params, gradients):
    """The same steps without any wrapper: the jitted step, the updates, the last state."""
    step = jax.jit(tx.update)
    return step, *_run(step, tx.init(params), params, gradients)


def _run(step, state, params, gradients):
    history = []
    for g in gradients:
        updates, state = step(g, state, params)
        history.append(updates)
    return history, state


def _assert_identical(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _assert_close(tree, expected):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6)


def test_donation_does_not_change_results(tx, plain, params, gradients):
    donated = jax.jit(tx.update, donate_argnums=1)
    _assert_identical(_run(donated, tx.init(params), params, gradients), plain[1:])


def test_a_scan_takes_the_same_steps(tx, plain, params, gradients):
    def body(state, g):
        updates, state = tx.update(g, state, params)
        return state, updates

    _, history, state = plain
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    scanned_state, scanned = jax.jit(lambda s: jax.lax.scan(body, s, stacked))(tx.init(params))
    _assert_close(scanned, jax.tree.map(lambda *u: jnp.stack(u), *history))
    _assert_close(qstate.dequantize(scanned_state), qstate.dequantize(state))


def test_vmap_steps_every_member_as_it_would_alone(tx, plain, params, gradients):
    members = [gradients[0], gradients[1], jax.tree.map(jnp.zeros_like, params)]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *members)
    copies = jax.tree.map(lambda p: jnp.stack([p, p, p]), params)
    state = jax.vmap(tx.init)(copies)
    updates, state = jax.jit(jax.vmap(tx.update))(stacked, state, copies)
    for i, g in enumerate(members):
        alone, alone_state = plain[0](g, tx.init(params), params)
        member, member_state = jax.tree.map(lambda x, i=i: x[i], (updates, state))
        _assert_close(member, alone)
        _assert_identical(member_state, alone_state)


def test_multi_steps_steps_on_the_mean(tx, plain, params, gradients):
    every_other = optax.MultiSteps(tx, every_k_schedule=2)
    twice = [g for g in gradients[:2] for _ in range(2)]
    history, state = _run(jax.jit(every_other.update), every_other.init(params), params, twice)
    assert all(not np.any(u) for first in history[::2] for u in jax.tree.leaves(first))
    _assert_close(history[1::2], plain[1][:2])
    assert int(state.gradient_step) == 2
    assert _ages(state) == [2, 2]


def test_masked_leaves_pass_through_and_hold_nothing(tx, params, gradients):
    masked = optax.masked(tx, {"bias": False, "kernel": True})
    history, state = _run(jax.jit(masked.update), masked.init(params), params, gradients)
    kernel = {"kernel": params["kernel"]}
    alone = [{"kernel": g["kernel"]} for g in gradients]
    expected, expected_state = _run(jax.jit(tx.update), tx.init(kernel), kernel, alone)
    for updates, one, g in zip(history, expected, gradients, strict=True):
        np.testing.assert_array_equal(updates["bias"], g["bias"])
        _assert_close(updates["kernel"], one["kernel"])
    assert qstate.nbytes(state) == qstate.nbytes(expected_state)


def test_partition_steps_each_part_as_it_would_alone(tx, plain, params, gradients):
    labels = {"bias": "rest", "kernel": "quantized"}
    both = optax.partition({"quantized": tx, "rest": optax.sgd(0.1)}, labels)
    history, _ = _run(jax.jit(both.update), both.init(params), params, gradients[:1])
    _assert_close(history[0]["kernel"], plain[1][0]["kernel"])
    np.testing.assert_allclose(history[0]["bias"], -0.1 * gradients[0]["bias"], rtol=1e-6)


def test_apply_if_finite_skips_the_whole_step(tx, plain, params, gradients):
    guarded = optax.apply_if_finite(tx, max_consecutive_errors=5)
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.inf), gradients[1])
    step = jax.jit(guarded.update)
    _, before = step(gradients[0], guarded.init(params), params)
    updates, after = step(bad, before, params)
    _assert_identical(after.inner_state, before.inner_state)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    resumed, _ = step(gradients[1], after, params)
    _assert_close(resumed, plain[1][1])


def test_a_chain_clips_before_the_averages(tx, plain, params, gradients):
    chained = optax.chain(optax.clip_by_global_norm(1.0), tx)
    history, _ = _run(jax.jit(chained.update), chained.init(params), params, gradients[:2])
    clip = optax.clip_by_global_norm(1.0)
    clipped = [clip.update(g, clip.init(params))[0] for g in gradients[:2]]
    expected, _ = _run(plain[0], tx.init(params), params, clipped)
    for a, b in zip(jax.tree.leaves(history), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=1e-6)


def test_an_injected_learning_rate_scales_the_update(params, gradients):
    tx = optax.inject_hyperparams(qstate.adamw)(learning_rate=0.5, storage="fp8", weight_decay=0.0)
    step, state = jax.jit(tx.update), tx.init(params)
    full, _ = step(gradients[0], state, params)
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    half, _ = step(gradients[0], state, params)
    assert step._cache_size() == 1
    _assert_close(jax.tree.map(lambda u: 2 * u, half), full)
    static, _ = jax.jit(qstate.adamw(0.5, weight_decay=0.0).update)(
        gradients[0], qstate.adamw(0.5).init(params), params
    )
    # 1 - b2 of a float32 b2 is not that of a Python float.
    for a, b in zip(jax.tree.leaves(full), jax.tree.leaves(static), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_injected_hyperparameters_in_bf16_are_refused(params16):
    with pytest.raises(ValueError, match=r"hyperparam_dtype=jnp\.float32"):
        optax.inject_hyperparams(qstate.adamw)(learning_rate=1e-3).init(params16)


def _ages(state):
    leaves = jax.tree.leaves_with_path(state)
    return [int(leaf) for path, leaf in leaves if getattr(path[-1], "name", "") == "age"]
