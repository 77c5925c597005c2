"""What a reset does to the next update of a small language model in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qstate
from qstate.cli._data import load_corpus, sample_windows
from qstate.cli._model import Decoder, ModelConfig

RESET_AT = 320  # the period that the theory gives for e4m3 and 0.999


@functools.cache
def setting():
    """A model, its loss and batches, the same for every policy."""
    graph, params = nnx.split(Decoder(ModelConfig(layers=1, hidden=256), rngs=nnx.Rngs(0)))

    def loss(params, windows):
        logits = nnx.merge(graph, params)(windows[:, :-1])
        targets = windows[:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    corpus = load_corpus(None, min_bytes=10_000)
    rng = np.random.default_rng(0)
    batches = jnp.stack(
        [jnp.asarray(sample_windows(corpus.train, rng, 4, 64)) for _ in range(RESET_AT + 1)]
    )
    return jax.grad(loss), params, batches


@functools.cache
def update_rms(mu_reset, nu_reset):
    """Root mean square of every step's update direction; the last one follows the reset."""
    grad, params, batches = setting()
    mu_storage, nu_storage = qstate.storage("fp8")
    tx = qstate.scale_by_adam(
        b2=0.999,
        mu_storage=mu_storage,
        nu_storage=nu_storage,
        mu_reset=mu_reset,
        nu_reset=nu_reset,
        key=1,
    )

    def step(carry, batch):
        params, state = carry
        direction, state = tx.update(grad(params, batch), state)
        params = optax.apply_updates(params, jax.tree.map(lambda d: -1e-3 * d, direction))
        return (params, state), optax.tree.norm(direction)

    _, norms = jax.jit(lambda c: jax.lax.scan(step, c, batches))((params, tx.init(params)))
    return np.asarray(norms)


@pytest.mark.slow
def test_soft_reset_of_the_second_moment_leaves_the_next_update_as_it_is():
    plain = update_rms(None, None)
    soft = update_rms(None, qstate.every(RESET_AT, kind="soft"))
    np.testing.assert_array_equal(soft[:-1], plain[:-1])
    assert soft[-1] / plain[-1] == pytest.approx(1, abs=0.05)
    assert soft[-1] != plain[-1]


@pytest.mark.slow
def test_hard_reset_of_both_moments_is_followed_by_a_sign_step():
    plain = update_rms(None, None)
    hard = update_rms(qstate.every(RESET_AT), qstate.every(RESET_AT))
    np.testing.assert_array_equal(hard[:-1], plain[:-1])
    assert 3 < hard[-1] / plain[-1] < 5


@pytest.mark.slow
def test_hard_reset_of_the_second_moment_alone_is_far_too_large_a_step():
    with pytest.warns(UserWarning, match=r"second moment alone.*soft"):
        norms = update_rms(None, qstate.every(RESET_AT))
    assert norms[-1] / update_rms(None, None)[-1] > 50
