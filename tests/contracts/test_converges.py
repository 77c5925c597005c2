"""Every transformation minimises a quadratic as its float32 original does, compiled once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

STEPS = 100


@pytest.fixture(scope="module")
def quadratic(params):
    """``sum c (p - target)^2 / 2`` with curvatures c from 0.1 to 1."""
    rng = np.random.default_rng(2)
    target = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    curvature = jax.tree.map(lambda p: jnp.asarray(10 ** rng.uniform(-1, 0, p.shape)), params)

    def loss(p):
        terms = jax.tree.map(lambda c, x, t: jnp.sum(c * (x - t) ** 2) / 2, curvature, p, target)
        return sum(jax.tree.leaves(terms))

    return loss


@pytest.fixture(scope="module")
def minimise(quadratic, params):
    """Runs 100 jitted steps under a learning-rate schedule: the loss, the state, the compiles."""

    def run(tx):
        traces = []

        @jax.jit
        def step(p, state):
            traces.append(1)
            updates, state = tx.update(jax.grad(quadratic)(p), state, p)
            return optax.apply_updates(p, updates), state

        p, state = params, tx.init(params)
        for _ in range(STEPS):
            p, state = step(p, state)
        assert step._cache_size() == len(traces)
        return float(quadratic(p)), state, len(traces)

    return run


@pytest.fixture(scope="module")
def float32_loss(minimise):
    losses = {}

    def of(case):
        if (case.original, case.rate) not in losses:
            tx = case.original(_schedule(case))
            losses[case.original, case.rate] = minimise(tx)[0]
        return losses[case.original, case.rate]

    return of


def _schedule(case):
    return optax.linear_schedule(case.rate, 0.0, STEPS)


def test_converges_as_in_float32_with_one_compile(
    case, quadratic, minimise, float32_loss, params, spec
):
    tx = case.make(_schedule(case))
    loss, state, compiles = minimise(tx)
    assert compiles == 1
    assert spec(state) == spec(tx.init(params))
    assert loss < quadratic(params) / case.falls
    assert loss < case.near * float32_loss(case)
