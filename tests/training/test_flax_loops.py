"""The loops that Flax users write: a Linen `TrainState` and an `nnx.Optimizer`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import qstate

STEPS = 60


@pytest.fixture(scope="module")
def data():
    """Eight classes, a noisy function of a small network's outputs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 32))
    scores = np.tanh(x @ rng.normal(size=(32, 32))) @ rng.normal(size=(32, 8))
    labels = np.argmax(scores + 2 * rng.gumbel(size=scores.shape), axis=1)
    return jnp.asarray(x, jnp.float32), jnp.asarray(labels)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(256)(x))
        return nn.Dense(8)(nn.gelu(nn.Dense(64)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 256, rngs=rngs)
        self.second = nnx.Linear(256, 64, rngs=rngs)
        self.last = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


def _cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _train_linen(tx, data):
    x, labels = data
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(step=jnp.int32(0))  # a Python number there compiles twice

    @jax.jit
    def step(state):
        loss = lambda p: _cross_entropy(state.apply_fn({"params": p}, x), labels)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(STEPS):
        state, loss = step(state)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return losses, state.opt_state


def _train_nnx(tx, data, states=None):
    x, labels = data
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: _cross_entropy(m(x), labels)  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = []
    for _ in range(STEPS):
        losses.append(float(step(model, optimizer)))
        if states is not None:
            states.append(jax.tree.map(lambda x: x, optimizer.opt_state))
    return losses, optimizer.opt_state


TRAIN = {"linen": _train_linen, "nnx": _train_nnx}


@pytest.fixture(scope="module", params=TRAIN.values(), ids=TRAIN.keys())
def train(request):
    return request.param


@pytest.fixture(scope="module")
def float32_loss(train, data):
    losses, _ = train(optax.adamw(1e-3), data)
    assert losses[-1] < 0.7 * losses[0]
    return losses[-1]


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(name, marks=[] if name in ("fp8", "fp4") else [pytest.mark.slow])
        for name in ("fp32", "bf16", "fp8", "fp4", "int8", "int4")
    ],
)
def test_the_loss_is_that_of_float32(train, data, float32_loss, storage):
    losses, state = train(qstate.adamw(1e-3, storage=storage), data)
    near = {"fp32": 1e-5, "bf16": 0.002, "fp8": 0.01, "int8": 0.01, "fp4": 0.06, "int4": 0.1}
    assert losses[-1] == pytest.approx(float32_loss, rel=near[storage])
    bits = {"fp32": 8, "bf16": 4, "fp8": 2.1, "int8": 2.1, "fp4": 1.1, "int4": 1.2}[storage]
    size = 32 * 256 + 256 * 64
    small = 8 * (256 + 64 + 64 * 8 + 8) + 40
    assert qstate.nbytes(state) < bits * size + small


@pytest.mark.slow
def test_a_wrapped_optimizer_trains(train, data):
    tx = qstate.quantize_state(optax.lion(3e-4), "fp8")
    plain, _ = train(optax.lion(3e-4), data)
    losses, _ = train(tx, data)
    assert losses[-1] == pytest.approx(plain[-1], rel=0.01)


@pytest.mark.parametrize(
    ("storage", "held", "size"),
    [
        pytest.param("fp8", "e4m3, block 128, stochastic", 32 * 256 + 32 * 2 * 4, id="fp8"),
        pytest.param("int4", "dynamic4, block 128, stochastic", 32 * 128 + 32 * 2 * 4, id="int4"),
    ],
)
def test_what_is_read_out_of_an_nnx_optimizers_state(data, storage, held, size):
    states = []
    _train_nnx(qstate.adamw(1e-3, storage=storage), data, states)
    before, after = states[-2:]
    rows = {row.path: row for row in qstate.describe(after)}
    kernel = next(row for path, row in rows.items() if "mu/first/kernel" in path)
    assert (kernel.shape, kernel.storage, kernel.bytes) == ((32, 256), held, size)
    stalled = qstate.stall_fraction(before, after)
    assert stalled.keys() == {"mu", "nu"}
    assert all(0 < share < 1 for share in stalled.values())
    mu = qstate.dequantize(after)[0].mu
    assert {leaf.dtype for leaf in jax.tree.leaves(mu)} == {jnp.dtype("float32")}
