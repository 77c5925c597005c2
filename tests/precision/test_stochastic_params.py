"""16-bit weights whose updates are rounded stochastically: unbiased, and nothing else moves."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import qstate

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
LARGEST = {BF16: float(ml_dtypes.finfo(BF16).max), F16: 65504.0}
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
MANY = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def _step(tx, u, state, p):
    updates, state = tx.update(u, state, p)
    return optax.apply_updates(p, updates), state


step = jax.jit(_step, static_argnums=0)
ROUND = qstate.stochastic_round_params(0)


def landed(p, u, tx=ROUND):
    """Parameters after the first step."""
    return np.asarray(step(tx, u, tx.init(p), p)[0])


def neighbours(x, dtype):
    """The numbers of ``dtype`` about float32 ones; twice the same where there is one."""
    x = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    near = x.astype(dtype)
    near = np.where(np.isinf(near), np.sign(near) * dtype.type(LARGEST[dtype]), near).astype(dtype)
    down, up = (np.nextafter(near, dtype.type(end)) for end in (-np.inf, np.inf))
    low = np.where(near.astype(np.float32) > x, down, near).astype(np.float64)
    high = np.where(near.astype(np.float32) < x, up, near).astype(np.float64)
    return low, high


def _same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _assert_same_bits(tree, expected):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert _same_bits(a, b)


# On which number a weight lands


@pytest.fixture(params=[BF16, F16], ids=str)
def moves(request):
    """A million weights and updates of any magnitude: dtype, weights, updates, float32 sums."""
    dtype, rng = request.param, np.random.default_rng(0)
    low, high = (-24, 15.9) if dtype == F16 else (-90, 90)
    draw = lambda low, high: rng.choice([-1, 1], MANY) * np.exp2(rng.uniform(low, high, MANY))  # noqa: E731
    p = draw(low, high).astype(dtype)
    # By less than the last bit, by as much as the weight, across zero to small numbers, anywhere.
    u = np.concatenate([p[: MANY // 2] * draw(-16, 2)[: MANY // 2], draw(low, high)[MANY // 2 :]])
    u[::7] = -p[::7] * (1 + np.exp2(rng.uniform(-14, -3, MANY)))[::7]
    u = u.astype(np.float32)
    return dtype, p, u, p.astype(np.float32) + u


def test_a_weight_lands_on_a_neighbour(moves):
    dtype, p, u, x = moves
    got = landed(p, u).astype(np.float64)
    low, high = neighbours(x, dtype)
    assert ((got == low) | (got == high)).all()
    between = (low < high) & (low < x) & (x < high)
    assert between.sum() > MANY / 4
    # 16 random bits: as often up as the fractions say.
    fraction = (x.astype(np.float64) - low)[between] / (high - low)[between]
    up = (got == high)[between].astype(np.float64)
    sigma = np.sqrt(np.sum(fraction * (1 - fraction)))
    assert abs(np.sum(up - fraction)) < 4 * sigma


def test_negatives_mirror(moves):
    _, p, u, _ = moves
    np.testing.assert_array_equal(-landed(p, u), landed(-p, -u))


def test_numbers_on_the_grid_never_move(moves):
    dtype, p, _, x = moves
    target = np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype).astype(np.float32)
    u = target - p.astype(np.float32)
    there = p.astype(np.float32) + u == target  # float32 has that update
    assert there.mean() > 0.9
    np.testing.assert_array_equal(landed(p, u).astype(np.float32)[there], target[there])


@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["+0", "-0"])
def test_zero_updates_move_nothing(moves, zero):
    _, p, _, _ = moves
    p[:2] = 0.0, -0.0
    p, state = jnp.asarray(p), ROUND.init(p)
    for _ in range(3):
        stepped, state = step(ROUND, jnp.full(MANY, zero), state, p)
        if zero == 0 and not np.signbit(zero):
            stepped = stepped.at[1].multiply(-1)  # -0.0 + 0.0 is 0.0
        assert _same_bits(stepped, p)


@pytest.mark.parametrize(
    ("dtype", "p", "u"),
    [
        pytest.param(BF16, 1.0, -1e-3, id="bfloat16-below-an-edge"),
        pytest.param(BF16, 1.0, 1e-3, id="bfloat16-above-an-edge"),
        pytest.param(BF16, -1.0, 1e-3, id="bfloat16-negative"),
        pytest.param(BF16, 1.9921875, 5e-3, id="bfloat16-up-to-an-edge"),
        pytest.param(BF16, 1.0, 4e-6, id="bfloat16-a-two-thousandth-of-a-step"),
        pytest.param(BF16, 0.0, 1e-30, id="bfloat16-small"),
        pytest.param(BF16, 3e38, -1e35, id="bfloat16-large"),
        pytest.param(BF16, 1024.0, -1023.9, id="bfloat16-to-another-magnitude"),
        pytest.param(F16, 1.0, -1e-5, id="float16-below-an-edge"),
        pytest.param(F16, -0.1, 1e-6, id="float16-negative"),
        pytest.param(F16, 2e-7, 1e-8, id="float16-subnormal"),
        pytest.param(F16, -3e-5, 1e-9, id="float16-negative-subnormal"),
        pytest.param(F16, 0.0, 1e-8, id="float16-out-of-zero"),
        pytest.param(F16, 0.0, -1e-8, id="float16-out-of-zero-downward"),
        pytest.param(F16, 6.1e-5, 1e-8, id="float16-below-the-smallest-normal"),
        pytest.param(F16, 6.104e-5, 1e-8, id="float16-above-the-smallest-normal"),
        pytest.param(F16, 65472.0, 10.0, id="float16-next-to-the-largest"),
    ],
)
def test_the_mean_is_the_number(dtype, p, u):
    p = np.full(MANY, p, dtype)
    u = np.float32(u)
    x = np.float64(np.float32(p[0]) + u)
    low, high = (float(n) for n in neighbours(np.float32(x), dtype))
    assert low < x < high
    got = landed(p, np.full(MANY, u)).astype(np.float64)
    assert set(got) == {low, high}
    share = (x - low) / (high - low)
    sigma = (high - low) * np.sqrt(share * (1 - share) / MANY)
    assert abs(got.mean() - x) < 4 * sigma


@DTYPES
def test_a_thousand_steps_of_a_thousandth_lead_from_1_to_0(dtype):
    """In the mean; to nearest, the first of them rounds away in bfloat16, and all others do."""
    tx = optax.chain(optax.sgd(1.0), qstate.stochastic_round_params(0))
    p, g = jnp.ones(2**14, dtype), jnp.full(2**14, 1e-3)
    walk = lambda c, _: (_step(tx, g, c[1], c[0]), None)  # noqa: E731
    scan = jax.jit(lambda c: jax.lax.scan(walk, c, length=1000)[0])
    got = np.asarray(scan((p, tx.init(p)))[0], np.float64)
    sigma = got.std() / np.sqrt(got.size)
    assert sigma > 0
    assert abs(got.mean()) < 4 * sigma
    to_nearest = lambda p, _: (p - g.astype(dtype), None)  # noqa: E731
    alone, _ = jax.lax.scan(to_nearest, p, length=1000)
    assert float(alone[0]) > (0.99 if dtype == BF16 else 0.01)


@DTYPES
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_it_ends_at_the_largest_number(dtype, sign):
    largest = LARGEST[dtype]
    p = np.full(2**12, sign * largest, dtype)
    for share in (1e-4, 2e-3):  # of bfloat16's largest, less than what float32 has above it
        got = landed(p, np.full(2**12, sign * share * largest, np.float32))
        np.testing.assert_array_equal(got.astype(np.float64), sign * largest)


@DTYPES
def test_bad_updates_hit_their_own_weights(dtype):
    got = landed(np.ones(4, dtype), np.array([np.nan, np.inf, -np.inf, 1], np.float32))
    np.testing.assert_array_equal(got.astype(np.float32), [np.nan, np.inf, -np.inf, 2])


def test_other_leaves_pass_as_they_are():
    p = {"f": jnp.ones(3), "i": jnp.arange(3), "none": None, "w": jnp.ones(3, BF16)}
    u = {"f": jnp.full(3, 1e-9), "i": jnp.ones(3, jnp.int32), "none": None, "w": jnp.full(3, 0.1)}
    p["masked"] = u["masked"] = optax.MaskedNode()
    updates, _ = ROUND.update(u, ROUND.init(p), p)
    assert all(updates[k] is u[k] for k in ("f", "i", "none"))
    assert updates["masked"] == optax.MaskedNode()
    assert updates["w"].dtype == jnp.float32
    without = ROUND.update({**u, "w": None}, ROUND.init(p), p)[0]
    assert without["w"] is None


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 5, 2)], ids=str)
def test_shapes(shape):
    got = landed(jnp.ones(shape, BF16), jnp.full(shape, 1e-3))
    assert (got.shape, got.dtype) == (shape, BF16)
    assert np.isin(got.astype(np.float32), [1.0, 1.0078125]).all()


# Where the random bits come from

HALFWAY = 1 + 2.0**-8  # between 1 and its neighbour in bfloat16


def rounded_up(p):
    return np.asarray(p, np.float32) > HALFWAY


def _unlike(a, b):
    return 0.4 < np.mean(a != b) < 0.6


def test_leaves_steps_and_keys_get_different_bits():
    p = {"a": jnp.ones((64, 128), BF16), "b": jnp.ones((64, 128), BF16)}
    u = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-8), p)
    first, state = step(ROUND, u, ROUND.init(p), p)
    second, _ = step(ROUND, u, state, p)
    a, b = rounded_up(first["a"]), rounded_up(first["b"])
    assert 0.4 < a.mean() < 0.6
    assert _unlike(a, b)
    assert _unlike(a, rounded_up(second["a"]))
    for seed in (1, 2**32):
        assert _unlike(a, rounded_up(landed(p["a"], u["a"], qstate.stochastic_round_params(seed))))
    again = step(ROUND, u, ROUND.init(p), p)[0]
    _assert_same_bits(again, first)


@pytest.mark.parametrize("moment", ["mu", "nu"])
def test_the_bits_are_not_those_of_an_optimizer_with_the_same_key(moment):
    p, u = jnp.ones((64, 128), BF16), jnp.full((64, 128), 2.0**-8)
    g = jnp.full(p.shape, HALFWAY if moment == "mu" else np.sqrt(HALFWAY), jnp.float32)
    for key in (0, 7):
        bf16 = qstate.storage("bf16")[0]
        adam = qstate.scale_by_adam(0.0, 0.0, mu_storage=bf16, nu_storage=bf16, key=key)
        _, state = jax.jit(adam.update)(g, adam.init(g))
        average = rounded_up(jax.tree.leaves(qstate.dequantize(getattr(state, moment)))[0])
        assert 0.4 < average.mean() < 0.6
        assert _unlike(average, rounded_up(landed(p, u, qstate.stochastic_round_params(key))))


@pytest.mark.parametrize(
    "key", [3, np.uint32(3), jax.random.key(3), jax.random.PRNGKey(3)], ids=str
)
def test_the_state_is_a_key(key):
    p = jnp.ones(9, BF16)
    state = qstate.stochastic_round_params(key).init(p)
    (leaf,) = jax.tree.leaves(state)
    assert (leaf.shape, leaf.dtype) == ((2,), np.uint32)
    _assert_same_bits(state, qstate.stochastic_round_params(3).init(p))


def test_a_skipped_step_takes_no_key_inside_of_a_loss_scale():
    p = jnp.ones(2**12, BF16)
    link = optax.chain(optax.sgd(1.0), ROUND)
    tx = qstate.with_loss_scale(link, jmp.NoOpLossScale())
    g, bad = jnp.full(p.shape, -(2.0**-8)), jnp.full(p.shape, jnp.inf)
    state = tx.init(p)
    same, skipped = step(tx, bad, state, p)
    _assert_same_bits(same, p)
    _assert_same_bits(skipped.inner_state, state.inner_state)
    taken, after = step(tx, g, skipped, p)
    assert not _same_bits(after.inner_state[1].key, state.inner_state[1].key)
    _assert_same_bits(taken, landed(p, -g))


# What runs it


def _run(tx, p, u, steps, state=None):
    state = tx.init(p) if state is None else state
    for _ in range(steps):
        p, state = step(tx, u, state, p)
    return p, state


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    p = {"b": jnp.ones(7, BF16), "w": jnp.asarray(rng.normal(size=(64, 128)), BF16)}
    return p, jax.tree.map(lambda x: x.astype(jnp.float32) * 2.0**-10, p)


def test_scan_takes_the_same_steps(weights):
    p, u = weights
    walk = lambda c, _: (_step(ROUND, u, c[1], c[0]), None)  # noqa: E731
    scanned = jax.jit(lambda c: jax.lax.scan(walk, c, length=4)[0])((p, ROUND.init(p)))
    _assert_same_bits(scanned, _run(ROUND, p, u, 4))


def _orbax(saved, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)


def _flax_bytes(saved, target, folder):
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved))


@pytest.mark.parametrize("through", [_orbax, _flax_bytes], ids=["orbax", "flax"])
def test_resuming_gives_the_same_bits(through, weights, tmp_path):
    p, u = weights
    halfway = _run(ROUND, p, u, 3)
    restored, state = through(halfway, (p, ROUND.init(p)), tmp_path)
    _assert_same_bits(_run(ROUND, restored, u, 3, state), _run(ROUND, p, u, 6))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_over_8_devices(kind, weights):
    if jax.device_count() < 8:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=8")
    axes = ("rows", "columns")
    if kind is AxisType.Auto:
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), axes)
    else:
        mesh = jax.make_mesh((2, 4), axes, (kind,) * 2)
    both, everywhere = (NamedSharding(mesh, PartitionSpec(*a)) for a in (axes, ()))
    place = lambda x: jax.device_put(x, both if x.ndim == 2 else everywhere)  # noqa: E731
    p, u = jax.tree.map(place, weights)
    state = jax.tree.map(place, ROUND.init(p))
    text = step.lower(ROUND, u, state, p).compile().as_text()
    pattern = r"\b(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)"
    assert not re.findall(pattern, text)
    got, state = _run(ROUND, p, u, 3, state)
    _assert_same_bits((got, state), _run(ROUND, *weights, 3))
    assert got["w"].sharding.is_equivalent_to(both, 2)


def test_flaxs_loops():
    """A model of one layer moves by updates that are too small for its weights."""
    tx = optax.chain(optax.sgd(2.0**-12), qstate.stochastic_round_params(0))
    model = nnx.Linear(64, 128, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.ones((64, 128), jnp.bfloat16)
    train = TrainState.create(apply_fn=None, params={"kernel": model.kernel[...]}, tx=tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    linen_step = jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)))
    for _ in range(8):
        nnx_step(model, optimizer)
        train = linen_step(train)
    for kernel in (train.params["kernel"], model.kernel[...]):
        kernel = np.asarray(kernel, np.float64)
        assert abs(kernel.mean() - (1 - 2.0**-9)) < 4 * kernel.std() / np.sqrt(kernel.size)


# What is refused


def test_the_parameters_are_needed():
    p = jnp.ones(3, BF16)
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        ROUND.update(p, ROUND.init(p))


@pytest.mark.parametrize("key", [0.5, "seed", None, np.zeros(3)], ids=str)
def test_what_is_no_key_is_refused_at_once(key):
    with pytest.raises(TypeError, match="a key is"):
        qstate.stochastic_round_params(key)


def test_parameters_in_8_bits_are_refused():
    p = jnp.ones(3, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*bfloat16 or float16"):
        ROUND.update(jnp.ones(3), ROUND.init(p), p)
