"""Master weights: the numbers. What is kept, what an optimizer sees, and where a step ends."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import qstate

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
REMAINDERS = pytest.mark.parametrize("remainder", [None, 16, 8], ids=["float32", "16", "8"])
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
MANY = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")


def _bits(x):
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def _assert_same_bits(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(_bits(a), _bits(b))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = {"bias": (7,), "head": (64, 128), "kernel": (33, 130)}
    return {name: jnp.asarray(rng.normal(0, 0.1, shape), BF16) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def gradients(params):
    rng = np.random.default_rng(1)
    draw = lambda p: jnp.asarray(rng.normal(size=p.shape) * np.exp(rng.normal()), jnp.float32)  # noqa: E731
    return [jax.tree.map(draw, params) for _ in range(30)]


@pytest.mark.parametrize(
    ("remainder", "bytes_each"), [(None, 6), (16, 4), (8, 3)], ids=["float32", "16", "8"]
)
@DTYPES
def test_bytes_a_parameter(dtype, remainder, bytes_each):
    params = {"w": jnp.ones((33, 130), dtype), "b": jnp.ones(7, dtype), "f": jnp.ones(9)}
    tx = qstate.with_master_weights(optax.sgd(0.1), remainder)
    state = tx.init(params)
    held = {k: p for k, p in params.items() if k != "f"}, state.master
    size = 33 * 130 + 7
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(held)) == bytes_each * size
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == (bytes_each - 2) * size


# Where a step ends

# What weights become: ``(random numbers, weights, exponents of the dtype) -> targets``.
MOVES = {
    "gradients from 1e-6 to 1e6": lambda rng, w, ends: w - _numbers(rng, np.log2([1e-6, 1e6])),
    "a small step": lambda rng, w, ends: w * (1 + _numbers(rng, (-12, -7))),
    "a fall by 2^20": lambda rng, w, ends: w * _numbers(rng, (-24, -16)),
    "from there anywhere": lambda rng, w, ends: _numbers(rng, ends),
    "across zero": lambda rng, w, ends: -w * np.exp2(rng.uniform(-30, 1, MANY)),
    "to where ties are": lambda rng, w, ends: _near_ties(w, rng),
    "to where it is": lambda rng, w, ends: w,
    "to zero": lambda rng, w, ends: np.where(rng.uniform(size=MANY) < 0.5, 0, w),
}
LAST_BITS = {(BF16, None): 0, (BF16, 16): 0, (BF16, 8): 2.0**-16}
LAST_BITS |= {(F16, None): 0, (F16, 16): 0, (F16, 8): 2.0**-19}
SMALLEST = {(BF16, None): 0, (BF16, 16): 0, (BF16, 8): 0}
SMALLEST |= {(F16, None): 0, (F16, 16): 1.5 * 2.0**-40, (F16, 8): 1.07 * 2.0**-33}


def _numbers(rng, ends):
    return rng.choice([-1, 1], MANY) * np.exp2(rng.uniform(*ends, MANY))


def _near_ties(w, rng):
    bits = (_bits(w.astype(np.float32)) & 0xFFFF0000) + 0x8000 + rng.integers(-2, 3, MANY)
    return np.where(w == 0, 0, bits.astype(np.uint32).view(np.float32))


def _cast_with_ties_away(w):
    """To bfloat16; the magnitude's bits are rounded, so also into the next binade."""
    return ((_bits(w).astype(np.uint64) + 0x8000) >> 16).astype(np.uint16).view(BF16)


@REMAINDERS
@DTYPES
def test_a_step_ends_on_the_cast_of_the_master_weight(dtype, remainder):
    rng = np.random.default_rng(0)
    ends, largest = ((-20, 13), 3e4) if dtype == F16 else ((-60, 60), 2.0**100)
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    step = jax.jit(tx.update)
    p = jnp.asarray(_numbers(rng, ends), dtype)
    state = tx.init(p)
    for name, move in MOVES.items():
        w, held = np.asarray(qstate.master_params(state, p)), np.abs(np.asarray(p, np.float64))
        target = np.clip(move(rng, w.astype(np.float64), ends), -largest, largest)
        g = (w - target).astype(np.float32)
        updates, state = step(g, state, p)
        p = optax.apply_updates(p, updates)
        assert (p.dtype, p.shape) == (dtype, (MANY,))
        master = np.asarray(qstate.master_params(state, p))
        if remainder == 16 and dtype == BF16:
            cast = _cast_with_ties_away(master)
        else:
            cast = master.astype(dtype)
        # As numbers: no update leads from 0.0 to -0.0.
        np.testing.assert_array_equal(np.float32(p), np.float32(cast), err_msg=name)

        wanted = (w - g).astype(np.float64)
        # Where a weight falls so far that float32 has no update to its cast: its own last bit.
        fallen = np.abs(wanted) < held * 2.0 ** (jnp.finfo(dtype).nmant - 23)
        allowed = np.where(fallen, 2.0**-24 * held, 0)
        allowed += LAST_BITS[dtype, remainder] * np.abs(wanted) + SMALLEST[dtype, remainder]
        assert (np.abs(master - wanted) <= allowed).all(), name


@REMAINDERS
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
def test_a_float16_weight_leaves_zero_by_steps_that_its_cast_cannot_see(sign, remainder):
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    p, state = _repeat(tx, jnp.zeros(3, jnp.float16), jnp.full(3, -sign * 1e-8), 1000)
    master = np.asarray(qstate.master_params(state, p))
    np.testing.assert_allclose(master, sign * 1e-5, rtol=0.01 if remainder == 8 else 1e-4)


def _repeat(tx, p, g, steps):
    def body(carry, _):
        p, state = carry
        updates, state = tx.update(g, state, p)
        return (optax.apply_updates(p, updates), state), None

    return jax.jit(lambda c: jax.lax.scan(body, c, length=steps)[0])((p, tx.init(p)))


@REMAINDERS
@DTYPES
def test_a_thousand_steps_of_a_thousandth_lead_from_1_to_0(dtype, remainder):
    """In bfloat16 alone the first of them rounds away, and so do all others."""
    p, g = jnp.ones(3, dtype), jnp.full(3, 1e-3)
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    stepped, state = _repeat(tx, p, g, 1000)
    master = np.asarray(qstate.master_params(state, stepped))
    last_bit = {None: 2.0**-24, 16: 2.0**-24, 8: 2.0**-19 if dtype == F16 else 2.0**-16}[remainder]
    assert np.abs(master).max() < 1000 * last_bit
    np.testing.assert_allclose(np.float32(stepped), master, rtol=2.0**-8, atol=1e-9)
    alone, _ = _repeat(optax.sgd(1.0), p, g.astype(dtype), 1000)
    assert np.all(np.asarray(alone, np.float32) > (0.99 if dtype == BF16 else 0.01))


# The same weights as a float32 optimizer's

INNER = {
    "sgd-momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "qstate.adamw-fp8": lambda: qstate.adamw(1e-2, weight_decay=0.1),
    "muon-fp8": lambda: qstate.quantize_state(
        optax.contrib.muon(1e-2, weight_decay=0.1, adam_weight_decay=0.1), "fp8"
    ),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(1e-2, 0.0, 20), weight_decay=0.1),
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(make, id=name, marks=[pytest.mark.slow] if "muon" in name else [])
        for name, make in INNER.items()
    ],
)
def inner(request):
    return request.param


@pytest.fixture(scope="module")
def float32_run(inner, params, gradients):
    """The weights after every step of the inner optimizer on float32 weights."""
    tx = inner()
    return _run(
        tx, jax.tree.map(lambda p: p.astype(jnp.float32), params), gradients, lambda s, p: p
    )


def _run(tx, p, gradients, read):
    state, step, history = tx.init(p), jax.jit(tx.update), []
    for g in gradients:
        updates, state = step(g, state, p)
        # Not in the jitted step: XLA would contract the product and the float32 weights' sum.
        p = optax.apply_updates(p, updates)
        history.append(read(state, p))
    assert step._cache_size() == 1
    return history


@pytest.mark.parametrize("remainder", [None, 16], ids=["float32", "16"])
def test_master_weights_are_those_of_a_float32_optimizer(
    remainder, inner, float32_run, params, gradients
):
    """To the last bit, weight decay included: it acts on the master weights."""
    tx = qstate.with_master_weights(inner(), remainder)
    for weights, expected in zip(
        _run(tx, params, gradients, qstate.master_params), float32_run, strict=True
    ):
        _assert_same_bits(weights, expected)


def test_8_bits_stay_near_a_float32_optimizer(inner, float32_run, params, gradients):
    tx = qstate.with_master_weights(inner(), 8)
    history = _run(tx, params, gradients, qstate.master_params)
    largest = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(float32_run))
    for steps, (weights, expected) in enumerate(zip(history, float32_run, strict=True), 1):
        for w, e in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            error = np.abs(np.asarray(w, np.float64) - np.asarray(e))
            assert error.max() <= steps * 2.0**-16 * largest
            if error.size > 1000:  # roundings to nearest cancel
                assert np.sqrt(np.mean(error**2)) <= np.sqrt(steps) * 2.0**-17 * largest


# What an optimizer sees


def _watching(seen):
    def update(updates, state, params=None, **extra_args):
        seen.append((updates, params, extra_args))
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: seen.append(params) or (), update)


@REMAINDERS
@DTYPES
def test_inner_sees_float32_and_every_extra_argument(dtype, remainder):
    seen = []
    tx = qstate.with_master_weights(_watching(seen), remainder)
    p = {"w": jnp.full((3, 5), 0.1, dtype), "f": jnp.ones(2), "i": jnp.arange(3), "none": None}
    state = tx.init(p)
    g = {"w": p["w"], "f": p["f"], "i": jnp.zeros(3, jnp.int32), "none": None}
    updates, state = tx.update(g, state, p, value=1.0, note="here")
    p = optax.apply_updates(p, updates)
    tx.update(g, state, p)
    at_init, (gradients, weights, extra), (_, later, _) = seen
    dtypes = {"w": jnp.float32, "f": jnp.float32, "i": jnp.int32}
    for tree in (at_init, gradients, weights):
        assert {k: v.dtype for k, v in tree.items() if v is not None} == dtypes
    assert extra == {"value": 1.0, "note": "here"}
    _assert_same_bits(weights["w"], np.full((3, 5), 0.1, dtype).astype(np.float32))
    held = np.float32(0.1).astype(dtype).astype(np.float32)
    np.testing.assert_allclose(later["w"], 2 * held, rtol=1e-6)
    np.testing.assert_array_equal(p["f"], 2.0)


@REMAINDERS
def test_leaves_of_all_kinds(remainder):
    """float32 leaves are their own master weights; integers, None and masked leaves have none."""
    shapes = {"flat": (7,), "odd": (129,), "scalar": (), "empty": (0, 3), "matrix": (3, 5, 2)}
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=shape), BF16) for k, shape in shapes.items()}
    params |= {"f": jnp.ones(5), "i": jnp.arange(4), "none": None, "masked": jnp.ones(9, BF16)}
    g = jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params)
    g["i"] = np.zeros(4, jax.dtypes.float0)
    mask = {k: k != "masked" for k in params}
    tx = optax.masked(qstate.with_master_weights(qstate.adamw(1e-3), remainder), mask)
    state = tx.init(params)
    (master,) = state.inner_state.master.values()
    wide = {None: 4, 16: 2, 8: 1}[remainder]
    for name in shapes:
        assert master[name].shape == params[name].shape
        assert master[name].nbytes == params[name].size * wide
    assert not jax.tree.leaves([master[k] for k in ("f", "i", "none", "masked")])
    updates, after = jax.jit(tx.update)(g, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    kept = [{k: v for k, v in tree.items() if k != "masked"} for tree in (params, updates)]
    stepped = optax.apply_updates(*kept)
    np.testing.assert_array_equal(stepped["i"], params["i"])
    np.testing.assert_allclose(stepped["f"], 1 - 1e-3, atol=1e-6)
    weights = qstate.master_params(after.inner_state, stepped | {"masked": optax.MaskedNode()})
    for name in shapes:
        old = np.asarray(params[name], np.float32)
        np.testing.assert_allclose(weights[name], old - 1e-3 * (1 + 1e-4 * old), atol=3e-5)


@REMAINDERS
@DTYPES
@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["+0", "-0"])
def test_a_zero_update_changes_no_bit(dtype, remainder, zero):
    to_zero = optax.stateless(lambda g, p: jax.tree.map(lambda x: jnp.full_like(x, zero), g))
    away = qstate.with_master_weights(optax.sgd(1.0), remainder)
    p = jnp.asarray([0.0, -0.0, 1.0, -1.0, 3e-7, -3e-7, 30000.0, 1e-3], dtype)
    updates, state = away.update(p.astype(jnp.float32) * 0.001, away.init(p), p)
    p = optax.apply_updates(p, updates).at[1].set(-0.0)
    tx = qstate.with_master_weights(to_zero, remainder)
    for update in (tx.update, jax.jit(tx.update)):
        updates, after = update(p, tx.init(p)._replace(master=state.master), p)
        _assert_same_bits(optax.apply_updates(p, updates), p)
        _assert_same_bits(after.master, state.master)


@REMAINDERS
@DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_bad_gradients_without_a_guard_hit_their_own_weights(dtype, remainder, bad):
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    p = jnp.ones(4, dtype)
    updates, state = jax.jit(tx.update)(jnp.array([0.5, bad, 0, 0.25]), tx.init(p), p)
    p = optax.apply_updates(p, updates)
    expected = np.array([0.5, 1 - bad, 1, 0.75])
    np.testing.assert_array_equal(np.asarray(p, np.float32), expected)
    np.testing.assert_array_equal(qstate.master_params(state, p), expected)


# What is refused


def test_master_params_says_what_is_missing():
    p = jnp.ones(3, BF16)
    with pytest.raises(ValueError, match=r"no master weights.*with_master_weights"):
        qstate.master_params(optax.adam(1e-3).init(p))
    twice = optax.chain(*[qstate.with_master_weights(optax.sgd(1.0))] * 2)
    with pytest.raises(ValueError, match="2 sets of master weights"):
        qstate.master_params(twice.init(p))
    needed = r"qstate\.master_params\(opt_state, params\)"
    for remainder in (16, 8):
        with pytest.raises(ValueError, match=needed):
            qstate.master_params(qstate.with_master_weights(optax.sgd(1.0), remainder).init(p))
    mixed = qstate.with_master_weights(optax.sgd(1.0)).init({"w": p, "f": jnp.ones(3)})
    with pytest.raises(ValueError, match=needed):
        qstate.master_params(mixed)


@pytest.mark.parametrize("remainder", [12, 32, 0, True, "16", 8.5])
def test_other_remainders_are_refused(remainder):
    with pytest.raises(ValueError, match=f"16 or 8 bits; got {remainder!r}"):
        qstate.with_master_weights(optax.sgd(1.0), remainder)


@REMAINDERS
def test_what_cannot_have_master_weights_is_refused(remainder):
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    with pytest.raises(ValueError, match=r"'a/w' is float8_e4m3fn.*bfloat16 and float16"):
        tx.init({"a": {"w": jnp.ones(3, jnp.float8_e4m3fn)}})
    p = {"w": jnp.ones(3, BF16)}
    state = tx.init(p)
    with pytest.raises(ValueError, match=r"tx\.update\(grads, state, params\)"):
        tx.update(p, state)


LATER = [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")]


@REMAINDERS
@pytest.mark.parametrize(("first", "later"), LATER)
def test_parameters_in_another_dtype_than_at_init_are_refused(remainder, first, later):
    if remainder is None and later == "float16":
        pytest.skip("float32 master weights are the same for both")
    tx = qstate.with_master_weights(optax.sgd(1.0), remainder)
    state = tx.init({"w": jnp.ones(3, first)})
    p = {"w": jnp.ones(3, later)}
    with pytest.raises(ValueError, match=f"'w', which is {later}"):
        tx.update(p, state, p)
    with pytest.raises(ValueError, match=f"'w', which is {later}"):
        qstate.master_params(state, p)
