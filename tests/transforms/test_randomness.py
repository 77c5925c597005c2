"""Where the random bits of a step come from: the key in the state, the leaf, the moment."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qstate


def _rounding(average, exact):
    """Whether every element was rounded up."""
    return np.asarray(exact) < np.asarray(average)


@pytest.fixture
def tx():
    """Both moments of equal values would be rounded by equal bits, were they not told apart."""
    e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128), "stochastic")
    return qstate.scale_by_adam(b1=0.5, b2=0.5, mu_storage=e4m3, nu_storage=e4m3, key=3)


@pytest.fixture
def twins():
    g = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (64, 128)), jnp.float32)
    return {"a": g, "b": g}


def test_two_equal_leaves_get_different_bits(tx, twins):
    _, state = tx.update(twins, tx.init(twins))
    for average in (state.mu, state.nu):
        assert 0.1 < np.mean(average.codes["a"] != average.codes["b"]) < 0.9


def test_two_moments_get_different_bits(twins):
    e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128), "stochastic")
    tx = qstate.scale_by_adam(b1=0.5, b2=0.5, mu_storage=e4m3, nu_storage=e4m3)
    ones = jax.tree.map(jnp.ones_like, twins)
    g = jax.tree.map(lambda x: x.at[:, 0].set(1.9), ones)  # 1 and 1 lie between the codes
    _, state = tx.update(g, tx.init(g))
    mu, nu = state.mu.codes["a"][:, 1:], state.nu.codes["a"][:, 1:]
    up_mu, up_nu = mu == mu.max(), nu == nu.max()
    assert 0.01 < np.mean(up_mu) < 0.99
    assert 0.01 < np.mean(up_nu) < 0.99
    assert abs(np.corrcoef(up_mu.ravel(), up_nu.ravel())[0, 1]) < 0.05


def test_two_steps_get_different_bits(twins):
    e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128), "stochastic")
    tx = qstate.scale_by_adam(b1=0.0, b2=0.5, mu_storage=e4m3, nu_storage=e4m3)
    _, first = tx.update(twins, tx.init(twins))
    _, second = tx.update(twins, first)
    assert 0.1 < np.mean(first.mu.codes["a"] != second.mu.codes["a"]) < 0.9
    assert np.any(first.key != second.key)


def test_one_key_gives_one_trajectory(tx, twins):
    runs = [tx.update(twins, tx.init(twins))[1] for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(3, id="int"),
        pytest.param(np.uint32(3), id="numpy"),
        pytest.param(jax.random.key(3), id="typed"),
        pytest.param(jax.random.PRNGKey(3), id="raw"),
        pytest.param(np.array([0, 3], np.uint32), id="numpy-raw"),
    ],
)
def test_the_key_is_raw_data_in_the_state(key, twins):
    state = qstate.adamw(1e-3, key=key).init(twins)[0]
    assert (state.key.shape, state.key.dtype) == ((2,), jnp.uint32)
    np.testing.assert_array_equal(state.key, [0, 3])


def test_seeds_differ(twins):
    codes = []
    for seed in (0, 1, 2**32):
        tx = qstate.adamw(1e-3, key=seed)
        codes.append(np.asarray(tx.update(twins, tx.init(twins), twins)[1][0].mu.codes["a"]))
    assert all(np.mean(a != b) > 0.1 for a, b in itertools.pairwise(codes))


def test_nearest_rounding_uses_no_key(twins):
    tx = qstate.scale_by_adam()
    state = tx.init(twins)
    np.testing.assert_array_equal(tx.update(twins, state)[1].key, state.key)


def test_donating_the_state_leaves_the_callers_key_alone(twins):
    key = jax.random.PRNGKey(3)
    tx = qstate.adamw(1e-3, key=key)
    jax.jit(tx.update, donate_argnums=1)(twins, tx.init(twins), twins)
    np.testing.assert_array_equal(tx.init(twins)[0].key, [0, 3])
    np.testing.assert_array_equal(key, [0, 3])
