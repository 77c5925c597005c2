"""The stall meter, against a count of codes in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qstate

STORAGES = {
    "bf16": qstate.storage("bf16"),
    "fp8": qstate.storage("fp8"),
    "fp4": qstate.storage("fp4"),
    "int8": qstate.storage("int8"),
    "int4": qstate.storage("int4"),
    "per-tensor": (qstate.Storage(qstate.E4M3, qstate.PerTensor(), "stochastic"),) * 2,
}
QUICK = ("bf16", "fp8", "fp4")


def _two_states(tx, shapes, steps=20, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda: {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}  # noqa: E731
    state, step = tx.init(draw()), jax.jit(tx.update)
    for _ in range(steps):
        before, state = state, step(draw(), state, draw())[1]
    return before, state


def _count(before, after, bits):
    """Unchanged codes and all codes, 4-bit ones unpacked."""
    a, b = (
        np.ascontiguousarray(x).view(np.uint16 if bits == 16 else np.uint8) for x in (before, after)
    )
    if bits == 4:
        a, b = (np.stack([x & 15, x >> 4]) for x in (a, b))
    return np.sum(a == b), a.size


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(pair, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, pair in STORAGES.items()
    ],
)
def test_the_share_of_unchanged_codes(storage):
    mu, nu = storage
    tx = qstate.scale_by_adam(mu_storage=mu, nu_storage=nu)
    before, after = _two_states(tx, {"a": (64, 128), "b": (2, 5000), "small": (7,)})
    stalled = qstate.stall_fraction(before, after)
    assert list(stalled) == ["mu", "nu"]
    for name, share in stalled.items():
        old, new = getattr(before, name), getattr(after, name)
        counts = [_count(old.codes[k], new.codes[k], old.storage.format.bits) for k in "ab"]
        same, total = np.sum(counts, axis=0)
        assert total == 64 * 128 + 2 * 5000
        assert (share.shape, share.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(share, same / total, rtol=1e-6)
        assert 0.001 < share < 0.999


def test_an_odd_number_of_packed_codes_counts_no_filling():
    mu, nu = STORAGES["fp4"]
    tx = qstate.scale_by_adam(mu_storage=mu, nu_storage=nu, exempt=lambda path, leaf: False)
    before, after = _two_states(tx, {"a": (3, 129)}, steps=3)
    share = float(qstate.stall_fraction(before, after)["mu"])
    assert share * 3 * 129 == pytest.approx(round(share * 3 * 129), abs=1e-3)
    zeros = {"a": jnp.zeros((3, 129))}
    still = tx.init(zeros)
    _, after = jax.jit(tx.update)(zeros, still)
    assert float(qstate.stall_fraction(still, after)["mu"]) == 1.0


def test_power_of_two_scales_compare_numbers():
    # All values double: codes stay, scales flip, and nothing stalls.
    held = qstate.Storage(qstate.E4M3, qstate.Block(128, scale="power_of_two"))
    tx = qstate.scale_by_adam(b1=0.5, mu_storage=held)
    g = {"w": jnp.ones((64, 128))}
    step = jax.jit(tx.update)
    before = step(g, tx.init(g))[1]
    after = step({"w": jnp.full((64, 128), 1.5)}, before)[1]
    np.testing.assert_array_equal(before.mu.codes["w"], after.mu.codes["w"])
    np.testing.assert_array_equal(qstate.dequantize(after).mu["w"], 1.0)
    assert float(qstate.stall_fraction(before, after)["mu"]) == 0


def test_float32_leaves_count_only_where_there_is_nothing_else():
    tx = qstate.scale_by_adam(nu_storage=STORAGES["bf16"][1])
    shapes = {"small": (7,)}
    before, after = _two_states(tx, shapes)
    assert float(qstate.stall_fraction(before, after)["nu"]) == 0
    still = tx.update({"small": jnp.zeros(7)}, tx.init({"small": jnp.zeros(7)}))[1]
    assert float(qstate.stall_fraction(tx.init({"small": jnp.zeros(7)}), still)["nu"]) == 1


def test_fields_of_one_name_are_counted_together():
    labels = {"a": "one", "b": "two"}
    adam = {label: qstate.quantize_state(optax.adam(1e-3), "fp8") for label in ("one", "two")}
    tx = optax.partition(adam, labels)
    before, after = _two_states(tx, {"a": (64, 128), "b": (64, 64)})
    stalled = qstate.stall_fraction(before, after)
    parts = {
        label: qstate.stall_fraction(before.inner_states[label], after.inner_states[label])["nu"]
        for label in adam
    }
    expected = (2 * parts["one"] + parts["two"]) / 3
    np.testing.assert_allclose(stalled["nu"], expected, rtol=1e-6)


def test_a_large_leaf_is_counted_exactly():
    # 2^24 + 2 elements: more than float32 counts one by one.
    size = (2, 2**23 + 1)
    codes = jnp.zeros(size, jnp.uint8)
    tx = qstate.adam(1e-3)
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct(size, jnp.float32)})[0].nu
    before = dataclasses.replace(
        state, codes={"w": codes}, scales={"w": jnp.ones(state.scales["w"].shape)},
        age=jnp.int32(0), mass=jnp.float32(0),
    )  # fmt: skip
    after = dataclasses.replace(before, codes={"w": codes.at[0, 0].set(1)})
    share = qstate.stall_fraction({"nu": before}, {"nu": after})
    np.testing.assert_allclose(list(share.values()), 1, rtol=1e-6)


def test_under_jit_and_inside_of_wrappers():
    tx = optax.apply_if_finite(optax.MultiSteps(qstate.adamw(1e-3), 2), 3)
    before, after = _two_states(tx, {"a": (64, 128)}, steps=6)
    eager = qstate.stall_fraction(before, after)
    jitted = jax.jit(qstate.stall_fraction)(before, after)
    assert eager.keys() == jitted.keys() == {"mu", "nu"}
    for name in eager:
        np.testing.assert_array_equal(eager[name], jitted[name])


@pytest.mark.parametrize("other", [qstate.adamw(1e-3, storage="bf16"), optax.adamw(1e-3)],
                         ids=["storage", "optax"])  # fmt: skip
def test_states_of_two_optimizers_are_refused(other):
    params = {"w": jnp.ones((64, 128))}
    with pytest.raises(ValueError, match="not of one optimizer"):
        qstate.stall_fraction(qstate.adamw(1e-3).init(params), other.init(params))


def test_states_of_two_models_are_refused():
    tx = qstate.adamw(1e-3)
    states = [tx.init({"w": jnp.ones((64, n))}) for n in (128, 256)]
    with pytest.raises(ValueError, match="not of one optimizer"):
        qstate.stall_fraction(*states)


def test_a_state_without_averages_is_refused():
    state = optax.adam(1e-3).init({"w": jnp.ones((64, 128))})
    with pytest.raises(ValueError, match="no average of qstate"):
        qstate.stall_fraction(state, state)
