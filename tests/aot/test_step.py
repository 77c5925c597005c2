"""One Adam step on a leaf: one kernel, in place, and no byte moved twice."""

import itertools

import jax
import pytest
from aot.programs import adam, arrays, installed, state_first, stored_arrays

import qstate
from qstate.cli._targets import H100, Target

MOVED = 1.03  # times what has to be: every byte read once and written once
TEMPORARY = 0.2  # bytes a parameter; on TPUs some 200 kB are there for leaves of any size


@pytest.fixture(
    params=itertools.product(("bf16", "fp8", "fp4"), ("float32", "bfloat16")), ids="-".join
)
def recipe(request) -> tuple[str, str]:
    """A storage's name and the gradients' dtype."""
    return request.param


def check(target: Target, recipe: tuple[str, str], *shapes: tuple[int, int]) -> None:
    storage, dtype = recipe
    tx = adam(target, *qstate.storage(storage))
    gradients, state = arrays(shapes, dtype), jax.eval_shape(tx.init, arrays(shapes))
    program = target.compile(state_first(tx), gradients, state, donate=1)
    size = sum(g.size for g in gradients)
    in_place = stored_arrays(state) // len(shapes)
    # On TPUs updates of 16 bits take memory that is made for them, so that they are not copied.
    in_place += dtype == "bfloat16" and target.platform == "tpu"
    assert program.kernels == [in_place] * len(shapes)
    assert not program.collectives
    assert program.in_place >= qstate.nbytes(state)
    assert program.temporary <= TEMPORARY * size
    assert program.moved <= MOVED * 2 * qstate.nbytes((gradients, state))


def test_step_is_one_kernel_in_place(target, recipe):
    check(target, recipe, (1024, 4096))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4096, 11008), (32000, 4096)], ids=str)
def test_step_on_a_large_leaf(target, recipe, shape):
    check(target, recipe, shape)


def test_a_kernel_for_every_leaf(target):
    check(target, ("fp8", "float32"), (1024, 4096), (512, 2048))


def test_copies_are_found():
    """What is not donated cannot be updated in place: the checks above have to see that."""
    tx, gradients = adam(H100, *qstate.storage("fp8")), arrays([(1024, 4096)])
    state = jax.eval_shape(tx.init, gradients)
    program = installed(H100).compile(state_first(tx), gradients, state)
    assert program.in_place == 0
    assert program.moved > MOVED * 2 * qstate.nbytes((gradients, state))
