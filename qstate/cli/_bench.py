"""`qstate bench`: what an optimizer step costs, on the device at hand or by the compilers."""

import argparse
import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax

from qstate.cli._compiling import compile_steps, program_table
from qstate.cli._progress import Progress
from qstate.cli._refusal import check_output, refuse
from qstate.cli._steps import SHAPES, STORAGES, steps_of
from qstate.cli._targets import TARGETS
from qstate.cli._timing import time_steps, timing_table, total

DEFAULT_STORAGES = ("bf16", "fp8", "fp4")
DTYPES = ("float32", "bfloat16")
FEWEST_ROUNDS = 3
_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}

_TIMING_LEGEND = """\
ms          median of {rounds} rounds, in which all steps take turns
call        step: qstate.step, the parameters in the same pass; update: tx.update, then
            optax.apply_updates
state       what the optimizer keeps from step to step
temporary   what the compiled program needs beside its operands and results
peak        parameters, gradients, state, results that are not in place, and temporaries"""

_PROGRAM_LEGEND = """\
kernels     Pallas kernels, each of which runs over a leaf once; 0: XLA's own loops
moved       bytes that the program's operations read and write in the device's memory
least       what has to be moved: every operand read once, every result written once
temporary   what the program needs beside its operands and results
in place    the share of the parameters' and the state's bytes that is updated in place
Figures of the compilers, for one device; nothing ran."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="time optimizer steps here, or see what the compilers make of them elsewhere",
        description="Times one optimizer step of AdamW in every storage on this machine's device, "
        "beside optax.adamw in float32; or compiles it for devices that need not be there.",
    )
    parser.add_argument(
        "--storage",
        action="append",
        choices=STORAGES,
        help=f"may be given several times (default: {', '.join(DEFAULT_STORAGES)})",
    )
    parser.add_argument(
        "--shapes",
        choices=SHAPES,
        default="squares",
        help="of the parameters: 1024x4096; three of 4096x4096 (default); 4096x11008; 32000x4096",
    )
    parser.add_argument(
        "--gradients", choices=DTYPES, default="float32", help="their dtype (default: float32)"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="of timing (default: %(default)s)"
    )
    parser.add_argument(
        "--compile-only",
        action="append",
        choices=TARGETS,
        metavar="TARGET",
        help="compile instead of running, for one of " + ", ".join(TARGETS) + "; may be given "
        "several times",
    )
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help="of the steps: reference, tiled_xla, pallas_tpu or pallas_gpu (default: what is best)",
    )
    parser.add_argument(
        "--peer", action="store_true", help="time flashoptim-jax, too, which has to be installed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Times or compiles, and reports; the exit status is 2 where the arguments will not do."""
    if args.rounds < FEWEST_ROUNDS:
        return refuse("bench", f"--rounds must be at least {FEWEST_ROUNDS}, got {args.rounds}")
    if args.compile_only and args.peer:
        return refuse("bench", "--peer is for steps that run: leave it out, or --compile-only")
    try:
        check_output("--json", args.json)
        report = _compile(args) if args.compile_only else _time(args)
    except (ModuleNotFoundError, RuntimeError, ValueError) as error:
        return refuse("bench", str(error))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    return 0


def _time(args: argparse.Namespace) -> dict[str, Any]:
    steps = steps_of(_storages(args), implementation=args.implementation, peer=args.peer)
    shapes = SHAPES[args.shapes]
    device = jax.devices()[0]
    if _PLATFORMS.get(args.implementation, device.platform) != device.platform:
        raise ValueError(
            f"{args.implementation} does not run on this device, a {device.platform}; see "
            "--compile-only for what it would do elsewhere"
        )
    with Progress(total(steps, args.rounds), args.quiet, "starting") as progress:
        rows = time_steps(
            steps, shapes, rounds=args.rounds, gradients=args.gradients, show=progress.show
        )
    print(f"{_described(shapes, args.gradients)}, on {device.device_kind}, {_versions_text()}.\n")
    print(timing_table(rows))
    print("\n" + _TIMING_LEGEND.format(rounds=args.rounds))
    return _report(args, shapes, rows) | {
        "device": device.device_kind,
        "platform": device.platform,
        "rounds": args.rounds,
    }


def _compile(args: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # no device is asked for
    shapes, rows, done = SHAPES[args.shapes], [], 0
    targets = [TARGETS[name] for name in dict.fromkeys(args.compile_only)]
    programs = len(targets) * (1 + 2 * len(_storages(args)))
    with Progress(programs, args.quiet, "starting") as progress:
        for target in targets:
            implementation = args.implementation or target.implementation
            steps = steps_of(_storages(args), implementation=implementation)
            rows += compile_steps(
                steps,
                target,
                shapes,
                gradients=args.gradients,
                show=lambda step, text, done=done: progress.show(done + step, text),
            )
            done += len(steps)
    print(f"{_described(shapes, args.gradients)}, {_versions_text()}.\n")
    print(program_table(rows))
    print("\n" + _PROGRAM_LEGEND)
    return _report(args, shapes, rows)


def _storages(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(args.storage or DEFAULT_STORAGES))


def _described(shapes: Any, gradients: str) -> str:
    names = [" x ".join(map(str, shape)) for shape in shapes]
    counts = [f"{names.count(name)} of {name}" for name in dict.fromkeys(names)]
    return f"One AdamW step: parameters {', '.join(counts)} in float32, gradients in {gradients}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("jax", "jaxlib", "optax", "libtpu", "jax-cuda13-plugin", "flashoptim-jax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _versions_text() -> str:
    versions = _versions()
    return f"JAX {versions['jax']}, Optax {versions['optax']}"


def _report(args: argparse.Namespace, shapes: Any, rows: Any) -> dict[str, Any]:
    return {
        "versions": _versions(),
        "shapes": [list(shape) for shape in shapes],
        "gradients": args.gradients,
        "implementation": args.implementation,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
