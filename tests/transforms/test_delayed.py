"""Moments under delayed scaling: what a step remembers of the one before, whatever runs it."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import qstate

B1, B2 = 0.9, 0.999
E4M3 = qstate.Storage(qstate.E4M3, qstate.Delayed(16, margin=1), "stochastic")
FP4 = (
    qstate.Storage(qstate.E2M1, qstate.Delayed(4, margin=1), "stochastic"),
    qstate.Storage(qstate.UE2M2, qstate.Delayed(4, margin=1), "stochastic", "sqrt"),
)


def _adam(mu=E4M3, nu=E4M3, **settings):
    return qstate.scale_by_adam(b1=B1, b2=B2, mu_storage=mu, nu_storage=nu, **settings)


def _gradients(steps, seed=0, growth=1.0):
    """One leaf in few bits, of odd sizes, and one that stays float32."""
    rng = np.random.default_rng(seed)
    draw = lambda n, *shape: jnp.asarray(rng.normal(size=shape) * growth**n, jnp.float32)  # noqa: E731
    return [{"bias": draw(n, 7), "kernel": draw(n, 33, 130)} for n in range(steps)]


def _run(tx, gradients, state=None):
    """States before the first step and after each, and the updates."""
    step, first = jax.jit(tx.update), tx.init(gradients[0]) if state is None else state
    states, history, state = [first], [], first
    for g in gradients:
        updates, state = step(g, state)
        states.append(state)
        history.append(updates)
    return states, history


def _assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _averages(tree, state, g):
    """What a step makes of the stored moments of the kernel before it rounds them, in float64."""
    held = tree(state)
    g = np.asarray(g["kernel"], np.float64)
    mu, nu = (np.asarray(m["kernel"], np.float64) for m in (held.mu, held.nu))
    return B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g * g


@pytest.mark.parametrize("wrapped", [False, True], ids=["scale_by_adam", "quantize_state"])
def test_every_step_adds_to_the_history_of_the_step_before(wrapped):
    gradients = _gradients(9, growth=1.5)
    if wrapped:
        scaled = optax.scale_by_adam(b1=B1, b2=B2)
        tx = qstate.quantize_state(scaled, qstate.Storage(qstate.E4M3, qstate.Delayed(4, 1)))
        moments = lambda state: state.inner_state  # noqa: E731
    else:
        tx = _adam(*(qstate.Storage(qstate.E4M3, qstate.Delayed(4, 1), "stochastic"),) * 2)
        moments = lambda state: state  # noqa: E731
    seen = ([0.0] * 4, [0.0] * 4)
    states, _ = _run(tx, gradients)
    for g, before, after in zip(gradients, states[:-1], states[1:], strict=True):
        fresh = _averages(lambda s: moments(qstate.dequantize(s)), before, g)
        for average, x, history in zip(
            (moments(after).mu, moments(after).nu), fresh, seen, strict=True
        ):
            largest = np.abs(x).max()
            expected = [2 * (max(history) or largest), largest, *history[:-1]]
            assert average.scales["kernel"].shape == (1, 5)
            np.testing.assert_allclose(average.scales["kernel"][0], expected, rtol=1e-6)
            assert average.scales["bias"] is None
            history[:] = average.scales["kernel"][0, 1:].tolist()


@pytest.mark.parametrize("storage", [(E4M3, E4M3), FP4], ids=["e4m3", "fp4"])
def test_a_blank_state_is_what_a_step_returns_the_like_of(storage):
    tx = _adam(*storage)
    gradients, step = _gradients(3), jax.jit(tx.update)
    first = state = tx.init(gradients[0])
    spec = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    for g in gradients:
        _, state = step(g, state)
        assert jax.tree.structure(state) == jax.tree.structure(first)
        assert spec(state) == spec(first)
    assert step._cache_size() == 1
    for average in (first.mu, first.nu):
        assert not any(np.any(x) for x in jax.tree.leaves((average.codes, average.scales)))
        assert average.scales["kernel"].dtype == jnp.float32


def test_leaves_that_stay_float32_step_as_in_optax():
    gradients = _gradients(4)
    plain = optax.scale_by_adam(b1=B1, b2=B2)
    step, state = jax.jit(plain.update), plain.init({"bias": gradients[0]["bias"]})
    for g, updates in zip(gradients, _run(_adam(), gradients)[1], strict=True):
        expected, state = step({"bias": g["bias"]}, state)
        np.testing.assert_array_equal(updates["bias"], expected["bias"])


@pytest.mark.parametrize(
    ("storage", "falls", "near"),
    # One scale for 4290 numbers is little for 4 bits, and more so an old one.
    [((E4M3, E4M3), 1000, 1.2), (FP4, 20, np.inf)],
    ids=["e4m3", "fp4"],
)
def test_a_quadratic_is_minimised(storage, falls, near):
    rng = np.random.default_rng(2)
    target = jnp.asarray(rng.normal(size=(33, 130)), jnp.float32)
    curvature = jnp.asarray(10 ** rng.uniform(-1, 0, target.shape), jnp.float32)
    loss = lambda p: jnp.sum(curvature * (p - target) ** 2) / 2  # noqa: E731

    def minimise(adam):
        schedule = optax.linear_schedule(0.1, 0.0, 100)
        tx = optax.chain(adam, optax.scale_by_learning_rate(schedule))

        def body(carry, _):
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            return (optax.apply_updates(p, updates), state), None

        start = jnp.zeros_like(target)
        (p, _), _ = jax.lax.scan(body, (start, tx.init(start)), length=100)
        return float(loss(p))

    got = minimise(_adam(*storage))
    assert got < float(loss(jnp.zeros_like(target))) / falls
    assert got < near * minimise(optax.scale_by_adam(b1=B1, b2=B2))


@pytest.mark.parametrize("storage", [(E4M3, E4M3), FP4], ids=["e4m3", "fp4"])
def test_a_hard_reset_leaves_exact_zeros_and_forgets_the_scale(storage):
    policy = qstate.every(5)
    states, history = _run(
        _adam(*storage, mu_reset=policy, nu_reset=policy, eps=1e-12), _gradients(11, growth=0.5)
    )
    for n, state in enumerate(states):
        assert (int(state.mu.age), int(state.nu.age)) == (n % 5, n % 5)
        for average in (state.mu, state.nu):
            held = jax.tree.leaves((average.codes, average.scales, average.mass))
            assert any(np.any(np.asarray(x, np.float32)) for x in held) == (n % 5 != 0)
    for read in jax.tree.leaves(qstate.dequantize(states[5])):
        assert read.dtype != jnp.float32 or not read.any()
    # The gradients are 32 times smaller than at first. The step is one of the sign, and what is
    # stored is scaled by its own magnitude.
    np.testing.assert_allclose(np.abs(history[5]["kernel"]), 1, rtol=1e-4)
    scale, *seen = np.asarray(states[6].mu.scales["kernel"])[0]
    assert scale == 2 * seen[0]
    assert not any(seen[1:])


def test_a_soft_reset_follows_the_corrected_average():
    """The scale is 32 times too large for a while: e4m3 has octaves enough for that."""
    g = [{"kernel": jnp.full((64, 128), 0.25)}] * 12
    tx = _adam(nu_reset=qstate.every(5, kind="soft"))
    states, history = _run(tx, g)
    assert [int(s.nu.age) for s in states] == [n % 5 for n in range(13)]
    for updates in history:
        np.testing.assert_allclose(np.mean(updates["kernel"]), 1, rtol=0.02)


def test_a_bad_gradient_spoils_a_leaf_until_a_reset_and_no_history():
    policy = qstate.every(3)
    gradients = _gradients(6)
    bad = dict(gradients[1], kernel=gradients[1]["kernel"].at[3, 4].set(np.nan))
    states, _ = _run(_adam(mu_reset=policy, nu_reset=policy), [gradients[0], bad, *gradients[2:]])
    for average in (states[2].mu, states[2].nu):
        scale, *seen = np.asarray(average.scales["kernel"])[0]
        assert np.isnan(scale)
        assert np.isfinite(seen).all()
    for name in ("mu", "nu"):
        before, after = (getattr(states[i], name).scales["kernel"][0, 1:] for i in (1, 2))
        np.testing.assert_array_equal(after, before)
    assert np.isnan(qstate.dequantize(states[2]).mu["kernel"]).all()
    assert np.isfinite(qstate.dequantize(states[2]).mu["bias"]).all()
    # A reset puts a zero in the place of NaN.
    assert not np.any(states[3].mu.scales["kernel"])
    assert np.isfinite(qstate.dequantize(states[5]).nu["kernel"]).all()


def test_a_scan_and_a_donated_state_take_the_same_steps():
    tx, gradients = _adam(*FP4), _gradients(6)
    states, history = _run(tx, gradients)
    donated, state = jax.jit(tx.update, donate_argnums=1), tx.init(gradients[0])
    for g, expected in zip(gradients, history, strict=True):
        updates, state = donated(g, state)
        _assert_same_bits(updates, expected)
    _assert_same_bits(state, states[-1])
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    body = lambda state, g: tx.update(g, state)[::-1]  # noqa: E731
    scanned, updates = jax.jit(lambda s: jax.lax.scan(body, s, stacked))(tx.init(gradients[0]))
    for got, expected in zip(
        jax.tree.leaves((updates, qstate.dequantize(scanned))),
        jax.tree.leaves(
            (jax.tree.map(lambda *u: jnp.stack(u), *history), qstate.dequantize(states[-1]))
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_under_vmap_every_member_has_its_own_history():
    tx = _adam()
    members = [_gradients(3, seed, growth) for seed, growth in enumerate((0.5, 1.0, 4.0))]
    alone = [_run(tx, gradients)[0][-1] for gradients in members]
    stacked = [jax.tree.map(lambda *g: jnp.stack(g), *turn) for turn in zip(*members, strict=True)]
    state, step = jax.vmap(tx.init)(stacked[0]), jax.jit(jax.vmap(tx.update))
    for g in stacked:
        _, state = step(g, state)
    for i, expected in enumerate(alone):
        _assert_same_bits(jax.tree.map(lambda x, i=i: x[i], state), expected)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("storage", [(E4M3, E4M3), FP4], ids=["e4m3", "fp4"])
def test_sharded_over_8_devices_it_is_the_same_bits_for_a_collective_of_scalars(storage):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("rows", "columns"))

    def place(tree):
        whole = lambda x: x.ndim != 2 or x.shape[0] == 1  # noqa: E731
        spec = lambda x: PartitionSpec() if whole(x) else PartitionSpec("rows", "columns")  # noqa: E731
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)

    rng = np.random.default_rng(0)
    gradients = [jnp.asarray(rng.normal(size=(512, 512)) * 3.0**n, jnp.float32) for n in range(4)]
    policy = qstate.every(3)
    tx = _adam(*storage, mu_reset=policy, nu_reset=policy)
    step, state = jax.jit(tx.update), tx.init(gradients[0])
    sharded = place(state)
    text = step.lower(place(gradients[0]), sharded).compile().as_text()
    for g in gradients:
        expected, state = step(g, state)
        updates, sharded = step(place(g), sharded)
        for a, b in zip(
            jax.tree.leaves((updates, sharded)), jax.tree.leaves((expected, state)), strict=True
        ):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert updates.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(*mesh.axis_names)), 2
    )
    moved = re.findall(r"= (.*) (?:all-\w+|reduce-scatter|collective-\w+)\(", text)
    assert 1 <= len(moved) <= 4  # one a moment and mesh axis
    assert set(re.findall(r"\w+\[[\d,]*\]", " ".join(moved))) <= {"s32[]", "s32[1,1]"}


def _orbax(saved, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)


def _flax(saved, target, folder):
    del folder
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved))


@pytest.mark.parametrize("through", [_orbax, _flax], ids=["orbax", "flax"])
def test_a_checkpoint_holds_the_history(through, tmp_path):
    gradients = _gradients(6)
    tx, other = _adam(), _adam(mu=qstate.Storage(qstate.E4M3, qstate.Delayed(8), "stochastic"))
    states, _ = _run(tx, gradients)
    restored = through(states[3], tx.init(gradients[0]), tmp_path)
    _assert_same_bits(restored, states[3])
    _assert_same_bits(_run(tx, gradients[3:], restored)[0][-1], states[-1])
    with pytest.raises(ValueError, match="delayed8"):
        through(states[3], other.init(gradients[0]), tmp_path / "other")
    # A margin may change from one run to the next.
    wider = _adam(mu=qstate.Storage(qstate.E4M3, qstate.Delayed(16, margin=2), "stochastic"))
    held = through(states[3], wider.init(gradients[0]), tmp_path / "wider")
    assert held.mu.storage.scaling.margin == 2
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(states[3]), strict=True):
        np.testing.assert_array_equal(a, b)
