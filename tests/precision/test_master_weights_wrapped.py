"""Master weights in what runs a step: wrappers, loops, meshes, Flax's loops, checkpoints."""

import functools
import itertools
import re

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import qstate

REMAINDERS = pytest.mark.parametrize(
    "remainder",
    [
        pytest.param(None, id="float32"),
        pytest.param(16, id="16", marks=pytest.mark.slow),  # what runs it is what runs 8 bits
        pytest.param(8, id="8"),
    ],
)


def _adamw():
    return optax.adamw(1e-2, weight_decay=0.1)


def _exact():
    """An optimizer whose products are exact: in any graph XLA compiles the same numbers."""
    return optax.chain(optax.add_decayed_weights(2.0**-4), optax.sgd(2.0**-7, momentum=0.5))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = {"bias": (7,), "kernel": (16, 128)}
    params = {k: jnp.asarray(rng.normal(0, 0.1, s), jnp.bfloat16) for k, s in shapes.items()}
    return params | {"float32": jnp.asarray(rng.normal(size=5), jnp.float32)}


@pytest.fixture(scope="module")
def gradients(params):
    rng = np.random.default_rng(1)
    draw = lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32).astype(p.dtype)  # noqa: E731
    return [jax.tree.map(draw, params) for _ in range(6)]


def _step(tx, g, state, p):
    updates, state = tx.update(g, state, p)
    return optax.apply_updates(p, updates), state


def _run(tx, params, gradients):
    step = jax.jit(lambda g, s, p: _step(tx, g, s, p))
    p, state = params, tx.init(params)
    for g in gradients:
        p, state = step(g, state, p)
    assert step._cache_size() == 1
    return p, state


@pytest.fixture(scope="module")
def plain(params, gradients):
    """``plain(remainder)``: optimizer, parameters and state after all gradients, not wrapped."""

    @functools.cache
    def of(remainder):
        tx = qstate.with_master_weights(_exact(), remainder)
        return tx, *_run(tx, params, gradients)

    return of


def _assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Wrappers and loops


@REMAINDERS
def test_inside_and_outside_of_a_loss_scale(remainder, plain, params, gradients):
    """The same bits as without one, and a skipped step changes none."""
    _, p, state = plain(remainder)
    expected = qstate.master_params(state, p)
    scale = jmp.DynamicLossScale(jnp.float32(2.0**10))
    scaled = [jax.tree.map(lambda x: x * 2**10, g) for g in gradients]
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.inf), scaled[0])
    for tx in (
        qstate.with_loss_scale(qstate.with_master_weights(_exact(), remainder), scale),
        qstate.with_master_weights(qstate.with_loss_scale(_exact(), scale), remainder),
    ):
        p, state = _run(tx, params, [*scaled, bad, bad])
        _assert_same_bits(p, plain(remainder)[1])
        _assert_same_bits(qstate.master_params(state, p), expected)
        assert float(qstate.loss_scale(state).loss_scale) == 2.0**8


@REMAINDERS
def test_master_params_finds_them_anywhere(remainder, params):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(
            qstate.with_loss_scale(
                qstate.with_master_weights(optax.adam(1e-3), remainder), jmp.NoOpLossScale()
            ),
            2,
        ).gradient_transformation(),
    )
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    _assert_same_bits(qstate.master_params(tx.init(params), params), wide)
    if remainder is None:
        narrow = {k: p for k, p in params.items() if k != "float32"}
        del wide["float32"]
        _assert_same_bits(qstate.master_params(tx.init(narrow)), wide)


@REMAINDERS
def test_scan(remainder, plain, params, gradients):
    tx, p, state = plain(remainder)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *gradients)
    scan = lambda c: jax.lax.scan(lambda c, g: (_step(tx, g, c[1], c[0]), None), c, stacked)[0]  # noqa: E731
    _assert_same_bits(jax.jit(scan)((params, tx.init(params))), (p, state))


@REMAINDERS
def test_cond_between_a_step_and_none(remainder, plain, params, gradients):
    tx = plain(remainder)[0]
    skip = lambda g, s, p: (p, s)  # noqa: E731
    take = lambda g, s, p: _step(tx, g, s, p)  # noqa: E731
    either = jax.jit(lambda taken, g, s, p: jax.lax.cond(taken, take, skip, g, s, p))
    state = tx.init(params)
    _assert_same_bits(either(False, gradients[0], state, params), (params, state))
    expected = _run(tx, params, gradients[:1])
    _assert_same_bits(either(True, gradients[0], state, params), expected)


@REMAINDERS
def test_multi_steps_around_and_inside(remainder, plain, params, gradients):
    """Twice the same gradient is one step on it."""
    _, p, state = plain(remainder)
    twice = [g for g in gradients for _ in range(2)]
    around = optax.MultiSteps(qstate.with_master_weights(_exact(), remainder), 2)
    inside = qstate.with_master_weights(
        optax.MultiSteps(_exact(), 2).gradient_transformation(), remainder
    )
    for tx in (around, inside):
        stepped, state_2 = _run(tx, params, twice)
        _assert_same_bits(stepped, p)
        _assert_same_bits(qstate.master_params(state_2, stepped), qstate.master_params(state, p))


@REMAINDERS
def test_vmap_steps_every_member_as_it_would_alone(remainder, plain, params, gradients):
    tx = plain(remainder)[0]
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    copies = stack(params, params, params)
    stepped = jax.jit(jax.vmap(lambda g, s, p: _step(tx, g, s, p)))(
        stack(*gradients[:3]), jax.vmap(tx.init)(copies), copies
    )
    alone = [_run(tx, params, [g]) for g in gradients[:3]]
    _assert_same_bits(stepped, stack(*alone))


@REMAINDERS
def test_donation_does_not_change_results(remainder, plain, params, gradients):
    tx, p, state = plain(remainder)
    donated = jax.jit(lambda g, s, p: _step(tx, g, s, p), donate_argnums=(1, 2))
    held = jax.tree.map(jnp.copy, params)
    held_state = tx.init(held)
    for g in gradients:
        held, held_state = donated(g, held_state, held)
    _assert_same_bits((held, held_state), (p, state))


@REMAINDERS
def test_no_array_is_in_a_state_twice(remainder, params):
    """Of such a one no two could be donated: the inner state may keep the weights as well."""
    inner = optax.GradientTransformation(lambda p: p, lambda g, kept, p: (g, p))
    state = qstate.with_master_weights(inner, remainder).init(params)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(places)) == len(places) == 5


# Meshes

COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)")


def _mesh(kind):
    if jax.device_count() < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    axes = ("rows", "columns")
    if kind is AxisType.Auto:
        return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), axes)
    return jax.make_mesh((2, 4), axes, (AxisType.Explicit,) * 2)


@REMAINDERS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_over_8_devices(kind, remainder):
    mesh, rng = _mesh(kind), np.random.default_rng(0)
    tx = qstate.with_master_weights(_adamw(), remainder)
    by_both = NamedSharding(mesh, PartitionSpec("rows", "columns"))

    def place(tree):
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda x: jax.device_put(x, by_both if x.ndim == 2 else everywhere), tree
        )

    step = jax.jit(lambda g, s, p: _step(tx, g, s, p))
    p = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.bfloat16)}
    state, p_sharded = tx.init(p), place(p)
    sharded = tx.init(p_sharded)
    text = step.lower(p_sharded, place(sharded), p_sharded).compile().as_text()
    assert not COLLECTIVE.findall(text)
    sharded = place(sharded)
    for _ in range(3):
        g = {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)}
        p, state = step(g, state, p)
        p_sharded, sharded = step(place(g), sharded, p_sharded)
        _assert_same_bits((p_sharded, sharded), (p, state))
    for leaf in jax.tree.leaves((p_sharded, sharded.master)):
        assert leaf.sharding.is_equivalent_to(by_both, 2)


# Flax's loops


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = lambda n: nn.Dense(n, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)  # noqa: E731
        return dense(8)(nn.gelu(dense(64)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        settings = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.first = nnx.Linear(32, 64, **settings)
        self.last = nnx.Linear(64, 8, **settings)

    def __call__(self, x):
        return self.last(nnx.gelu(self.first(x)))


def _cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _train_linen(tx, x, labels):
    model = Linen()
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(step=jnp.int32(0))  # a Python number there compiles twice

    @jax.jit
    def step(state):
        loss = lambda p: _cross_entropy(state.apply_fn({"params": p}, x), labels)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(60):
        state, loss = step(state)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return losses, state.params, state.opt_state


def _train_nnx(tx, x, labels):
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: _cross_entropy(m(x), labels)  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    return losses, nnx.state(model, nnx.Param), optimizer.opt_state


@pytest.mark.parametrize(
    ("train", "remainder"),
    [
        pytest.param(_train_linen, None, id="linen-float32"),
        pytest.param(_train_linen, 8, id="linen-8"),
        pytest.param(_train_nnx, 16, id="nnx-16"),
    ],
)
def test_a_bfloat16_model_learns(train, remainder):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 32))
    labels = np.argmax(np.tanh(x @ rng.normal(size=(32, 32))) @ rng.normal(size=(32, 8)), axis=1)
    tx = qstate.with_master_weights(optax.sgd(0.02, momentum=0.9), remainder)
    losses, params, state = train(tx, jnp.asarray(x, jnp.bfloat16), labels)
    assert losses[-1] < 0.6 * losses[0]
    weights = jax.tree.leaves(qstate.master_params(state, params))
    for w, p in zip(weights, jax.tree.leaves(params), strict=True):
        assert (w.dtype, p.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_allclose(np.float32(p), w, rtol=2.0**-8)


# Checkpoints


def _orbax(saved, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)


def _flax_bytes(saved, target, folder):
    (folder / "state.msgpack").write_bytes(flax.serialization.to_bytes(saved))
    return flax.serialization.from_bytes(target, (folder / "state.msgpack").read_bytes())


LAYOUTS = {"float32": None, "remainder16": 16, "remainder8": 8}
THROUGH = pytest.mark.parametrize("through", [_orbax, _flax_bytes], ids=["orbax", "flax"])


@THROUGH
@REMAINDERS
def test_resuming_gives_the_same_bits(remainder, through, plain, params, gradients, tmp_path):
    tx, p, state = plain(remainder)
    halfway = _run(tx, params, gradients[:3])
    restored = through(halfway, (params, tx.init(params)), tmp_path)
    _assert_same_bits(restored, halfway)
    step = jax.jit(lambda g, s, p: _step(tx, g, s, p))
    for g in gradients[3:]:
        restored = step(g, restored[1], restored[0])
    _assert_same_bits(restored, (p, state))


@THROUGH
@pytest.mark.parametrize(
    ("saved", "other"),
    [pytest.param(*pair, id="-".join(pair)) for pair in itertools.permutations(LAYOUTS, 2)],
)
def test_master_weights_kept_in_another_way_are_refused(saved, other, through, params, tmp_path):
    states = [
        qstate.with_master_weights(_exact(), LAYOUTS[name]).init(params) for name in (saved, other)
    ]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the texts are the libraries'
        through(*states, tmp_path)
    assert other in str(error.value)
