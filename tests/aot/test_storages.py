"""The kernels compile for every storage that they say they support, and inside of loops."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from aot.programs import adam, arrays, installed, state_first, stored_arrays
from jax import lax

import qstate
from qstate import BF16, E2M1, E4M3, E5M2, F16, INT8, UE2M2, UE4M4, Block, NoScale, Storage
from qstate.cli._targets import H100, V5E, Target

# Formats of both moments, and the second one's domain.
FORMATS = {
    "e4m3": (E4M3, E4M3, "linear"),
    "e5m2": (E5M2, E5M2, "linear"),
    "ue4m4": (E4M3, UE4M4, "linear"),
    "int8": (INT8, INT8, "linear"),
    "e2m1": (E2M1, UE2M2, "sqrt"),
}
SCALES = ("float32", "bfloat16", "power_of_two")
SHAPES = {"full": (512, 1024), "tail": (512, 1100)}


def storages():
    """Every format with every block and scale; the roundings alternate."""
    product = itertools.product(FORMATS, (32, 64, 256), SCALES)
    for i, (name, block, scale) in enumerate(product):
        rounding = ("nearest", "stochastic")[i % 2]
        mu, nu, domain = FORMATS[name]
        scaling = Block(block, scale)
        pair = Storage(mu, scaling, rounding), Storage(nu, scaling, rounding, domain)
        yield pytest.param(pair, id=f"{name}-{block}-{scale}-{rounding}")
    stochastic = [
        ("e4m3-16", E4M3, Block(16), E4M3, Block(16)),
        ("e4m3-1024", E4M3, Block(1024), E4M3, Block(1024)),
        ("e5m2-no-scale", E5M2, NoScale(), E5M2, NoScale()),
        ("bf16-and-ue4m4", BF16, NoScale(), UE4M4, Block(128)),
        ("e2m1-and-bf16", E2M1, Block(128), BF16, NoScale()),
    ]
    for name, mu, mu_scaling, nu, nu_scaling in stochastic:
        pair = Storage(mu, mu_scaling, "stochastic"), Storage(nu, nu_scaling, "stochastic")
        yield pytest.param(pair, id=name)


@pytest.fixture(params=[V5E, H100], ids=lambda target: target.name)
def target(request) -> Target:
    return installed(request.param)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*nearest")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pair", [*storages()])
def test_kernel_compiles(target, pair, shape):
    tx = adam(target, *pair)
    gradients = arrays([shape])
    state = jax.eval_shape(tx.init, gradients)
    program = target.compile(state_first(tx), gradients, state, donate=1)
    assert program.kernels == [stored_arrays(state)]
    assert program.in_place >= qstate.nbytes(state)


F16_PAIR = (Storage(F16, Block(128), "stochastic"),) * 2


def test_float16_compiles_for_gpu():
    tx, gradients = adam(H100, *F16_PAIR), arrays([(512, 1024)])
    program = installed(H100).compile(
        state_first(tx), gradients, jax.eval_shape(tx.init, gradients)
    )
    assert len(program.kernels) == 1


def test_float16_is_refused_for_tpu():
    tx, gradients = adam(V5E, *F16_PAIR), arrays([(512, 1024)])
    with pytest.raises(ValueError, match="TPUs have no float16"):
        installed(V5E).compile(state_first(tx), gradients, jax.eval_shape(tx.init, gradients))


@pytest.fixture
def chain(target) -> optax.GradientTransformationExtraArgs:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        adam(target, *qstate.storage("fp8")),
        optax.scale_by_learning_rate(1e-3),
    )


def test_steps_inside_of_scan(target, chain):
    params = arrays([(1024, 4096)])
    state = jax.eval_shape(chain.init, params)

    def step(carry, rate):
        params, state = carry
        updates, state = chain.update([rate * p for p in params], state, params)
        return (optax.apply_updates(params, updates), state), None

    def train(params, state, rates):
        return lax.scan(step, (params, state), rates)[0]

    rates = jax.ShapeDtypeStruct((7,), jnp.float32)
    program = target.compile(train, params, state, rates, donate=(0, 1))
    assert program.kernels == [4]
    assert program.in_place >= qstate.nbytes((params, state))
    assert program.temporary <= 1.01 * 2 * qstate.nbytes(params)  # gradients and updates


def test_step_inside_of_cond(target, chain):
    gradients = arrays([(1024, 4096)])
    state = jax.eval_shape(chain.init, gradients)

    def take(gradients, state):
        return chain.update(gradients, state)[::-1]

    def skip(gradients, state):
        return state, jax.tree.map(jnp.zeros_like, gradients)

    def step(gradients, state, finite):
        return lax.cond(finite, take, skip, gradients, state)

    finite = jax.ShapeDtypeStruct((), jnp.bool_)
    program = target.compile(step, gradients, state, finite, donate=1)
    assert program.kernels == [4]
    assert program.in_place >= qstate.nbytes(state)
    # Updates before the learning rate; and XLA copies what a branch updates in place on a GPU.
    assert program.temporary <= 1.01 * qstate.nbytes((gradients, state))
