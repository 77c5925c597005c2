"""What the docs say of kernels is what there is."""

from pathlib import Path

import jax
import pytest
from aot.programs import arrays, installed, state_first, stored_arrays
from aot.support import HEADING, cases, refusal, table, transformation

import qstate
from qstate.cli._targets import H100, V5E

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_table_of_what_runs_where_is_in_the_docs():
    lines = DOCS.read_text().splitlines()
    start = lines.index(HEADING[0])
    assert lines[start : start + len(table())] == table(), "python tests/aot/support.py prints it"
    assert not lines[start + len(table())].startswith("|")


@pytest.mark.slow
@pytest.mark.parametrize("target", [V5E, H100], ids=lambda target: target.name)
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[0]}, {case[1]}")
def test_what_is_called_a_kernel_compiles(case, target):
    _, shape, mu, nu = case
    if refusal(target.implementation, shape, mu, nu) is not None:
        pytest.skip("no kernel")
    tx, gradients = transformation(target.implementation, mu, nu), arrays([shape])
    state = jax.eval_shape(tx.init, gradients)
    program = installed(target).compile(state_first(tx), gradients, state, donate=1)
    assert program.kernels == [stored_arrays(state)]
    assert program.in_place >= qstate.nbytes(state)
