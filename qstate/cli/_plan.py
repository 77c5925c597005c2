"""`qstate plan`: what the theory expects of a format and a decay, before anything is trained."""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from qstate import theory
from qstate.cli._refusal import refuse
from qstate.cli._table import format_table
from qstate.numerics import FORMATS

STARTUP_THRESHOLD = 0.8
"""The stalled fraction that ends the startup window."""

LEGEND = """\
bytes       a parameter's share of one average, scales not counted (float32 per 128 adds 0.03)
rho         half a grid spacing over a typical step; well above 1, nearest rounding never lowers v
v stalled   elements whose stored code a step leaves unchanged, once v is at rest
looks back  steps that v remembers under nearest rounding; {horizon} if nothing stalled, and on
            average under stochastic rounding too, however much it stalls
80% after   steps from zero until 80% of v stalls under nearest rounding
reset       K*, the period of qstate.theory(); in brackets where 80% never stalls: little to gain
int8, dynamic and linear grids are not floating point; their rows hold near a block's maximum."""


class NamedFormat(Protocol):
    """What a plan asks of a format."""

    @property
    def bits(self) -> int: ...

    @property
    def epsilon(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One format's line of the plan; steps are None where they are never reached."""

    format: str
    bits: int
    bytes_per_parameter: float
    mu_precision_ratio: float
    nu_precision_ratio: float
    stalled_nearest: float
    stalled_stochastic: float
    effective_decay: float
    startup_window: int | None
    reset_period: int


def plan_rows(
    formats: Mapping[str, NamedFormat], b2: float, tolerance: float = 0.6, b1: float = 0.9
) -> list[PlanRow]:
    """The plan of a second moment of decay `b2` in each of `formats`, by name.

    Args:
      formats: the formats to plan for, in the order of the rows.
      b2: decay of the second moment.
      tolerance: s₀ of `theory.reset_period`.
      b1: decay of the first moment, of which only the precision ratio is known.

    Returns:
      A row for each format.

    Raises:
      ValueError: a decay outside (0, 1), or a tolerance outside [0, 1).

    Example:
      >>> from types import SimpleNamespace
      >>> (row,) = plan_rows({"e4m3": SimpleNamespace(bits=8, epsilon=2**-3)}, b2=0.999)
      >>> row.reset_period, row.startup_window, row.bytes_per_parameter
      (320, 38, 1.0)
    """
    return [
        PlanRow(
            format=name,
            bits=format.bits,
            bytes_per_parameter=format.bits / 8,
            mu_precision_ratio=theory.precision_ratio(format, b1),
            nu_precision_ratio=theory.precision_ratio(format, b2),
            stalled_nearest=theory.stall_probability(format, b2),
            stalled_stochastic=theory.stall_probability(format, b2, "stochastic"),
            effective_decay=theory.effective_decay(format, b2),
            startup_window=theory.startup_window(format, b2, STARTUP_THRESHOLD),
            reset_period=theory.reset_period(format, b2, tolerance),
        )
        for name, format in formats.items()
    ]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="stalled fractions and reset periods for a format and a decay",
        description="What to expect of an average kept in few bits: how much of it stalls, how "
        "soon after a start, and the reset period that follows. Closed forms; nothing is trained.",
    )
    parser.add_argument("--format", metavar="NAME", help="one format (default: all of them)")
    parser.add_argument("--b2", type=float, default=0.999, help="decay of v (default: 0.999)")
    parser.add_argument("--b1", type=float, default=0.9, help="decay of m (default: 0.9)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.6,
        help="share of the final stalling that does no harm, for the period (default: 0.6)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; the exit status is 2 where the arguments make none."""
    formats = FORMATS
    if args.format is not None:
        name = args.format.lower()
        if name not in FORMATS:
            return refuse("plan", f"unknown format {args.format!r}; one of: {', '.join(FORMATS)}")
        formats = {name: FORMATS[name]}
    try:
        rows = plan_rows(formats, args.b2, args.tolerance, args.b1)
    except ValueError as error:
        return refuse("plan", str(error))
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2, allow_nan=False))
    else:
        horizon = _steps(1 / (1 - args.b2))
        print(
            f"Adam with b1 = {args.b1:g} and b2 = {args.b2:g}: m averages "
            f"{_steps(1 / (1 - args.b1))} steps, v {horizon}. Reset tolerance {args.tolerance:g}.\n"
        )
        print(plan_table(rows))
        print("\n" + LEGEND.format(horizon=horizon))
    return 0


def plan_table(rows: Iterable[PlanRow]) -> str:
    """The rows as aligned text, under two lines of heading."""
    heading = [
        ("", "", "", "rho", "rho", "v stalled", "v stalled", "v looks", "80%", "reset v"),
        (
            "format",
            "bits",
            "bytes",
            "of m",
            "of v",
            "nearest",
            "stochastic",
            "back",
            "after",
            "every",
        ),
    ]
    return format_table(heading, [_cells(row) for row in rows], left=1)


def _cells(row: PlanRow) -> tuple[str, ...]:
    period = _steps(row.reset_period)
    return (
        row.format,
        str(row.bits),
        f"{row.bytes_per_parameter:g}",
        _ratio(row.mu_precision_ratio),
        _ratio(row.nu_precision_ratio),
        f"{row.stalled_nearest:.1%}",
        f"{row.stalled_stochastic:.1%}",
        _horizon(row.effective_decay),
        "never" if row.startup_window is None else _steps(row.startup_window),
        f"({period})" if row.startup_window is None else period,
    )


def _steps(steps: float) -> str:
    return f"{round(steps):,}"


def _horizon(decay: float) -> str:
    # An average of over a million steps is frozen for a training run; by how much is no matter.
    steps = 1 / (1 - decay) if decay < 1 else math.inf
    return _steps(steps) if steps <= 1e6 else ">1e6"


def _ratio(rho: float) -> str:
    return f"{rho:.3g}" if rho >= 0.001 else f"{rho:.0e}"
