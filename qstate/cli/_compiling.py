"""What the compilers of TPUs and GPUs make of an optimizer step, without a device."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax

import qstate
from qstate.cli._steps import Step, arrays
from qstate.cli._table import format_table
from qstate.cli._targets import Target


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step; bytes are a parameter's."""

    target: str
    optimizer: str
    call: str
    kernels: int
    """Pallas kernels; one a leaf, or none where XLA alone did it."""
    moved_bytes: float
    """Read and written by the program's operations."""
    least_bytes: float
    """What has to be: every operand read once, every result written once."""
    temporary_bytes: float
    in_place: float
    """The share of donated bytes, parameters and state, that is updated in place."""
    collectives: int
    """Operations that move something between devices."""


def compile_steps(
    steps: Sequence[Step],
    target: Target,
    shapes: Sequence[tuple[int, ...]],
    *,
    gradients: str = "float32",
    show: Callable[[int, str], None] = lambda done, text: None,
) -> list[Program]:
    """Compiles steps on parameters (float32) of some shapes for one device of a kind.

    Raises:
      CompilerMissing: with what to install.
    """
    size = sum(math.prod(shape) for shape in shapes)
    params, grads = arrays(shapes), arrays(shapes, gradients)
    rows = []
    for done, step in enumerate(steps):
        show(done, f"{target.name}: {step.optimizer} {step.call}")
        state = jax.eval_shape(step.init, params)
        compiled = target.compile(step.advance, params, state, grads, donate=(0, 1))
        kept = qstate.nbytes((params, state))
        rows.append(
            Program(
                target=target.name,
                optimizer=step.optimizer,
                call=step.call,
                kernels=len(compiled.kernels),
                moved_bytes=compiled.moved / size,
                least_bytes=(2 * kept + qstate.nbytes(grads)) / size,
                temporary_bytes=compiled.temporary / size,
                in_place=min(1.0, compiled.in_place / kept),
                collectives=len(compiled.collectives),
            )
        )
    return rows


def program_table(rows: Sequence[Program]) -> str:
    """The rows as aligned text."""
    heading = [
        ("", "", "", "", "moved", "least", "temporary", "in", ""),
        (
            "target",
            "optimizer",
            "call",
            "kernels",
            "B/param",
            "B/param",
            "B/param",
            "place",
            "collectives",
        ),
    ]
    cells = [
        (
            row.target,
            row.optimizer,
            row.call,
            str(row.kernels),
            f"{row.moved_bytes:.2f}",
            f"{row.least_bytes:.2f}",
            f"{row.temporary_bytes:.2f}",
            f"{row.in_place:.0%}",
            str(row.collectives),
        )
        for row in rows
    ]
    return format_table(heading, cells, left=3)
