"""Which leaves are not finite, how many numbers of each, and the cause that fits."""

import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import qstate

PARAMS = {"b": jnp.ones(3), "w": jnp.ones((2, 4))}


def gradients(bad=np.inf, dtype=jnp.float16):
    w = jnp.ones((2, 4), dtype).at[1, 3].set(bad)
    return {"b": jnp.ones(3, dtype), "w": w}


def state_of(loss_scale, skipped=0):
    """A state whose last steps were skipped, with the scale still where it began."""
    tx = qstate.with_loss_scale(optax.adam(1e-3), loss_scale)
    return tx.init(PARAMS)._replace(notfinite_count=jnp.int32(skipped))


def dynamic(scale=2.0**15, **settings):
    return jmp.DynamicLossScale(jnp.float32(scale), **settings)


CAUSES = {
    # gradients, state, loss, params -> cause
    "all-finite": (gradients(1.0), None, None, None, "finite"),
    "finite-after-skips": (gradients(1.0), state_of(dynamic(), 99), 1.0, PARAMS, "finite"),
    "nan-parameter": (gradients(), state_of(dynamic()), np.inf, gradients(np.nan), "parameters"),
    "only-parameter": (gradients(1.0), None, None, gradients(np.inf, jnp.float32), "parameters"),
    "infinite-loss": (gradients(), state_of(dynamic()), np.inf, PARAMS, "forward overflow"),
    "nan-loss": (gradients(np.nan), None, jnp.float16(np.nan), None, "forward overflow"),
    "loss-alone": (gradients(1.0), None, -np.inf, None, "forward overflow"),
    "probing": (gradients(), state_of(dynamic()), 1.0, PARAMS, "probing"),
    "probing-in-f32": (gradients(np.nan, jnp.float32), state_of(dynamic()), 1.0, None, "probing"),
    "14-skipped": (gradients(), state_of(dynamic(), 14), 1.0, None, "probing"),
    "15-skipped": (gradients(), state_of(dynamic(), 15), 1.0, None, "collapse"),
    "at-1": (gradients(), state_of(dynamic(1.0)), 1.0, None, "collapse"),
    "above-1": (gradients(), state_of(dynamic(2.0)), 1.0, None, "probing"),
    "at-its-own-floor": (
        gradients(),
        state_of(dynamic(8.0, min_loss_scale=jnp.float32(8.0))),
        1.0,
        None,
        "collapse",
    ),
    "static": (gradients(), state_of(jmp.StaticLossScale(8.0)), 1.0, None, "overflow"),
    "static-in-f32": (
        gradients(dtype=jnp.float32),
        state_of(jmp.StaticLossScale(8.0)),
        1.0,
        None,
        "overflow",
    ),
    "large-loss": (gradients(), state_of(dynamic()), jnp.float32(1e6), PARAMS, "probing"),
    "f16-beside-f32": (
        {**gradients(np.inf, jnp.float32), "b": jnp.full(3, jnp.inf, jnp.float16)},
        None,
        None,
        None,
        "overflow",
    ),
    "f16-without-scale": (gradients(), None, 1.0, PARAMS, "overflow"),
    "f16-guarded": (gradients(), state_of(jmp.NoOpLossScale()), 1.0, None, "overflow"),
    "bf16": (gradients(dtype=jnp.bfloat16), None, 1.0, PARAMS, "mathematics"),
    "f32": (gradients(np.nan, jnp.float32), None, 1.0, PARAMS, "mathematics"),
    "bf16-guarded": (
        gradients(dtype=jnp.bfloat16),
        state_of(jmp.NoOpLossScale(), 3),
        1.0,
        PARAMS,
        "mathematics",
    ),
    "floor-not-in-f32": (
        gradients(),
        state_of(jmp.DynamicLossScale(jnp.float32(0.1), min_loss_scale=0.1)),
        1.0,
        None,
        "collapse",
    ),
}


@pytest.mark.parametrize(
    ("grads", "state", "loss", "params", "cause"),
    CAUSES.values(),
    ids=CAUSES.keys(),
)
def test_the_cause_that_fits(grads, state, loss, params, cause):
    report = qstate.explain_nonfinite(grads, state, loss=loss, params=params)
    assert report.cause == cause
    assert str(report).splitlines()[-1] == f"{cause}: {report.advice}"


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("nan-parameter", r"qstate\.with_loss_scale\(tx, jmp\.NoOpLossScale\(\)\)"),
        ("infinite-loss", r"qstate\.fp32_island.*bfloat16"),
        ("probing", r"nothing is to be done"),
        ("at-1", r"qstate\.fp32_island.*learning rate"),
        ("static", r"jmp\.DynamicLossScale"),
        ("f32", r"jax_debug_nans"),
    ],
)
def test_the_advice_names_what_to_do(cause, advice):
    grads, state, loss, params, _ = CAUSES[cause]
    report = qstate.explain_nonfinite(grads, state, loss=loss, params=params)
    assert re.search(advice, report.advice)


def test_the_numbers_of_each_leaf_are_counted():
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 4, size=(37, 11))  # of a number: finite, inf, -inf or NaN
    numbers = np.choose(kinds, [1.0, np.inf, -np.inf, np.nan])
    grads = {
        "dense": [{"kernel": jnp.asarray(numbers, jnp.bfloat16)}, (jnp.ones(4),)],
        "complex": jnp.asarray([1, complex(np.inf, 0), complex(0, np.nan)], jnp.complex64),
        "empty": jnp.zeros((0, 3)),
        "int": jnp.arange(3),
        "masked": optax.MaskedNode(),
        "none": None,
        "one": jnp.float16(np.nan),
    }
    report = qstate.explain_nonfinite(grads)
    infinite, nan = int(np.isin(kinds, (1, 2)).sum()), int((kinds == 3).sum())
    assert {leaf.path: leaf[1:] for leaf in report.leaves} == {
        "dense/0/kernel": ("bfloat16", 37 * 11, infinite, nan),
        "complex": ("complex64", 3, 1, 1),
        "one": ("float16", 1, 0, 1),
    }
    assert report.inspected == 5  # not the int leaf


def test_sharded_gradients():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Explicit,))
    numbers = np.ones((16, 4), np.float32)
    numbers[3, 1] = numbers[12, 0] = np.inf
    numbers[15, 3] = np.nan
    grads = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("x")))
    (leaf,) = qstate.explain_nonfinite({"w": grads}).leaves
    assert (leaf.elements, leaf.infinite, leaf.nan) == (64, 2, 1)


def test_the_report_printed():
    grads = {
        "bias": jnp.full(2, jnp.nan),
        "embedding": jnp.zeros((1000, 2)).at[:600].set(jnp.inf),
        "head": jnp.ones(5),
    }
    report = qstate.explain_nonfinite(grads, state_of(dynamic(), 2), loss=0.5)
    assert str(report).splitlines()[:-1] == [
        "2 of 3 leaves are not finite, loss scale 32768, 2 steps skipped in a row",
        "leaf       dtype    elements    inf  NaN",
        "----------------------------------------",
        "bias       float32         2      0    2",
        "embedding  float32     2,000  1,200    0",
    ]
    assert (report.scale, report.skipped) == (32768.0, 2)


def test_the_report_without_a_table():
    report = qstate.explain_nonfinite(gradients(1.0))
    assert str(report) == (
        "0 of 2 leaves are not finite\nfinite: all gradients are finite; the step is taken."
    )
    assert (report.leaves, report.scale, report.skipped) == ([], None, None)


def test_a_guard_without_a_scale_has_skipped_steps_but_no_scale():
    report = qstate.explain_nonfinite(gradients(), state_of(jmp.NoOpLossScale(), 2))
    assert (report.scale, report.skipped) == (None, 2)
    assert str(report).splitlines()[0] == "1 of 2 leaves are not finite, 2 steps skipped in a row"


def test_the_state_is_found_inside_of_others():
    guarded = qstate.with_loss_scale(optax.sgd(1.0), dynamic(4.0))
    tx = optax.chain(optax.MultiSteps(guarded, 2).gradient_transformation())
    assert qstate.explain_nonfinite(gradients(), tx.init(PARAMS)).scale == 4.0


def test_inside_of_jit_there_is_nothing_to_read():
    with pytest.raises(TypeError, match=r"inside of jax\.jit: return the gradients from the"):
        jax.jit(lambda g: qstate.explain_nonfinite(g).inspected)(gradients())
    outside = gradients()
    with pytest.raises(TypeError, match=r"inside of jax\.jit: return the gradients from the"):
        jax.jit(lambda loss: qstate.explain_nonfinite(outside, loss=loss).inspected)(1.0)
    with pytest.raises(TypeError):
        jax.jit(lambda s: qstate.explain_nonfinite(outside, s).inspected)(state_of(dynamic()))


# Of computations that go wrong.


def _explained(loss, params, loss_scale):
    tx = qstate.with_loss_scale(optax.sgd(0.1), loss_scale)
    state = tx.init(params)
    scale = qstate.loss_scale(state)
    scaled = lambda p: (scale.scale(loss(p)), loss(p))  # noqa: E731
    grads, value = jax.jit(jax.grad(scaled, has_aux=True))(params)
    return qstate.explain_nonfinite(grads, state, loss=value, params=params)


def _half(x):
    return x.astype(jnp.float16)


def test_a_scale_that_is_too_large():
    loss = lambda p: jnp.mean(_half(p["x"]).astype(jnp.float32) ** 2)  # noqa: E731
    report = _explained(loss, {"x": jnp.full(8, 10.0)}, dynamic(2.0**20))
    assert report.cause == "probing"
    assert report.leaves[0][:3] == ("x", "float32", 8)


def test_logits_beyond_float16():
    loss = lambda p: jnp.sum(jax.nn.log_softmax(_half(p["q"]) * _half(p["k"]))[:2])  # noqa: E731
    params = {"k": jnp.array([300.0, 300.0, 1.0]), "q": jnp.array([300.0, 300.0, 1.0])}
    assert _explained(loss, params, dynamic()).cause == "forward overflow"


def test_the_root_of_zero():
    report = _explained(
        lambda p: jnp.sum(jnp.sqrt(p["x"])), {"x": jnp.array([0.0, 1.0])}, jmp.NoOpLossScale()
    )
    assert report.cause == "mathematics"
    assert report.leaves == [("x", "float32", 2, 1, 0)]
