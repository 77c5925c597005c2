"""With float32 storage `quantize_state` equals the inner transformation, bit for bit."""

import jax
import numpy as np
import optax
import pytest

import qstate

INNER = {
    "scale_by_adam": lambda: optax.scale_by_adam(),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "adabelief": lambda: optax.adabelief(1e-3),
    "yogi": lambda: optax.yogi(1e-3),
    "nadam": lambda: optax.nadam(1e-3),
    "adan": lambda: optax.adan(1e-3),
    "adamax": lambda: optax.adamax(1e-3),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "muon": lambda: optax.contrib.muon(2e-2),
    "ademamix": lambda: optax.contrib.ademamix(1e-3),
    "adopt": lambda: optax.contrib.adopt(1e-3),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())
def test_float32_storage_equals_the_inner_transformation(inner, jit, params, gradients):
    exact, plain = qstate.quantize_state(inner(), qstate.Storage(qstate.F32)), inner()
    state, expected_state = exact.init(params), plain.init(params)
    update, expected_update = (
        (jax.jit(exact.update), jax.jit(plain.update)) if jit else (exact.update, plain.update)
    )
    p = params
    for g in gradients:
        updates, state = update(g, state, p)
        expected, expected_state = expected_update(g, expected_state, p)
        _assert_identical(updates, expected)
        p = optax.apply_updates(p, expected)
    held = qstate.dequantize(state).inner_state
    _assert_identical(held, expected_state)


def _assert_identical(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype
