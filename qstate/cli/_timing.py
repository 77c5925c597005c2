"""Times optimizer steps on the device at hand.

They take turns, every round in another order, so that a slow moment of the machine, or what a step
leaves behind in caches and memory, is no one's alone.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qstate
from qstate.cli._steps import REFERENCE, Step
from qstate.cli._table import format_table

_WARM_UP = 2  # rounds that do not count


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured of one step; bytes a parameter are the compiler's figures."""

    optimizer: str
    call: str
    milliseconds: float
    """The median of all rounds."""
    ratio: float
    """To the median of optax's AdamW in float32, of the same rounds."""
    state_bytes: float
    temporary_bytes: float
    peak_bytes: float
    """Parameters, gradients, state, results that are not in place, and temporaries."""
    rounds: list[float]
    """Milliseconds of every round."""


@dataclasses.dataclass
class _Run:
    step: Step
    program: Any
    params: Any
    state: Any
    state_bytes: int
    rounds: list[float] = dataclasses.field(default_factory=list)


def time_steps(
    steps: Sequence[Step],
    shapes: Sequence[tuple[int, ...]],
    *,
    rounds: int,
    gradients: str = "float32",
    show: Callable[[int, str], None] = lambda done, text: None,
) -> list[Timing]:
    """Times steps on parameters (float32) of some shapes.

    Args:
      steps: the first one is what the others are compared to.
      shapes: of the parameters.
      rounds: how often each step is timed.
      gradients: their dtype.
      show: called with how many programs are compiled and rounds done, and what comes next.
    """
    size = sum(int(np.prod(shape)) for shape in shapes)
    grads = {
        str(i): (0.1 * jax.random.normal(jax.random.key(i), shape)).astype(gradients)
        for i, shape in enumerate(shapes)
    }
    runs, order = [], random.Random(0)
    for done, step in enumerate(steps):
        show(done, f"compiling {step.optimizer} {step.call}")
        runs.append(_start(step, grads))
    for turn in range(_WARM_UP + rounds):
        show(len(steps) + turn, "timing")
        for run in order.sample(runs, len(runs)):
            start = time.perf_counter()
            results = jax.block_until_ready(run.program(run.params, run.state, grads))
            run.rounds.append(1e3 * (time.perf_counter() - start))
            run.params, run.state = results
    assert runs[0].step.optimizer == REFERENCE
    reference = statistics.median(runs[0].rounds[_WARM_UP:])
    return [_timing(run, size, reference) for run in runs]


def total(steps: Sequence[Step], rounds: int) -> int:
    """What `show` counts to."""
    return len(steps) + _WARM_UP + rounds


def timing_table(rows: Sequence[Timing]) -> str:
    """The rows as aligned text."""
    heading = [
        ("", "", "", "ratio to", "state", "temporary", "peak"),
        ("optimizer", "call", "ms", "optax", "B/param", "B/param", "B/param"),
    ]
    cells = [
        (
            row.optimizer,
            row.call,
            f"{row.milliseconds:.1f}" if row.milliseconds >= 10 else f"{row.milliseconds:.3f}",
            f"{row.ratio:.2f}",
            f"{row.state_bytes:.2f}",
            f"{row.temporary_bytes:.2f}",
            f"{row.peak_bytes:.2f}",
        )
        for row in rows
    ]
    return format_table(heading, cells, left=2)


def _start(step: Step, grads: Any) -> _Run:
    params = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32) * 0.2, grads)
    state = step.init(params)  # under jit another package's takes minutes to compile
    size = qstate.nbytes(state)
    jitted = jax.jit(step.advance, donate_argnums=(0, 1))
    return _Run(step, jitted.lower(params, state, grads).compile(), params, state, size)


def _timing(run: _Run, size: int, reference: float) -> Timing:
    memory = run.program.memory_analysis()
    temporary = memory.temp_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + temporary
    rounds = run.rounds[_WARM_UP:]
    return Timing(
        optimizer=run.step.optimizer,
        call=run.step.call,
        milliseconds=statistics.median(rounds),
        ratio=statistics.median(rounds) / reference,
        state_bytes=run.state_bytes / size,
        temporary_bytes=temporary / size,
        peak_bytes=(peak - memory.alias_size_in_bytes) / size,
        rounds=rounds,
    )
