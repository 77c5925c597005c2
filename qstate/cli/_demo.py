"""`qstate demo`: trains one small language model per storage and prints what few bits cost."""

import argparse
import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qstate.cli._progress import Progress
from qstate.cli._refusal import check_output, refuse
from qstate.cli._steps import STORAGES

if TYPE_CHECKING:
    from qstate.cli._train import TrainConfig

DEFAULT_STORAGES = ("fp32", "bf16", "fp8", "fp4")
REFERENCE = "fp32"
RESETS = ("none", "paper", "theory", "soft")
ROUNDINGS = ("stochastic", "nearest")
FEWEST_STEPS = 5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model in fp32 and in few bits, side by side",
        description="Trains a small LLaMA-style model on real text, once per storage from the same "
        "start and on the same batches, and prints the loss, the bytes of state, and how much of "
        "it stalls. Takes a few minutes on two CPU cores.",
    )
    parser.add_argument(
        "--storage",
        action="append",
        choices=STORAGES,
        help="storage to compare with fp32; may be given again (default: bf16, fp8 and fp4)",
    )
    parser.add_argument("--steps", type=int, default=350, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a text file or a directory of them (default: Python's standard library)",
    )
    parser.add_argument(
        "--reset", choices=RESETS, default="none", help="when averages restart (default: none)"
    )
    parser.add_argument(
        "--rounding", choices=ROUNDINGS, help="instead of the rounding of each storage's recipe"
    )
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="a jmp policy for all but the float32 run, such as "
        "params=bfloat16,compute=bfloat16,output=float32; 16-bit parameters get master weights",
    )
    parser.add_argument(
        "--loss-scale",
        default="none",
        metavar="SCALE",
        help="none, dynamic or a number, for all but the float32 run (default: %(default)s)",
    )
    parser.add_argument(
        "--remainder",
        type=int,
        choices=(16, 8),
        help="keep master weights as 16-bit parameters and so many bits (default: in float32)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, such as a .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers and curves")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Trains and reports; the exit status is 2 where the arguments or the data will not do."""
    needed = ("flax", "rich", "matplotlib") if args.plot else ("flax", "rich")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return refuse("demo", f'needs {" and ".join(missing)}: pip install "qstate[demo]"')
    try:
        _check_arguments(args)
    except ValueError as error:
        return refuse("demo", str(error))

    from qstate.cli._data import DataError, load_corpus
    from qstate.cli._model import ModelConfig
    from qstate.cli._precision import parse_precision
    from qstate.cli._report import draw, print_report, summarize, write_json
    from qstate.cli._train import TrainConfig, train

    config, model_config = TrainConfig(steps=args.steps, seed=args.seed), ModelConfig()
    names = list(dict.fromkeys([REFERENCE, *(args.storage or DEFAULT_STORAGES)]))
    try:
        precision = parse_precision(args.policy, args.loss_scale, args.remainder)
        corpus = load_corpus(args.data, min_bytes=8 * (config.sequence_length + 1))
        storages = {name: _storages(name, args.rounding) for name in names}
        transforms = {name: _optimizer(name, storages[name], args.reset, config) for name in names}
    except (DataError, ValueError) as error:
        return refuse("demo", str(error))

    start = time.perf_counter()
    with Progress(config.steps, args.quiet, "compiling") as progress:
        precisions = {name: precision for name in names if name != REFERENCE}

        def show(step: int, losses: dict[str, float]) -> None:
            progress.show(step, "  ".join(f"{name} {loss:.2f}" for name, loss in losses.items()))

        runs = train(corpus, transforms, config, model_config, show, precisions)
    seconds = time.perf_counter() - start
    rows = [
        summarize(name, run, runs[REFERENCE], storages[name], config) for name, run in runs.items()
    ]
    print_report(rows, config, corpus.source, seconds, precision)
    if args.json:
        write_json(
            args.json,
            rows,
            source=corpus.source,
            reset=args.reset,
            precision=precision,
            config=config,
            model_config=model_config,
        )
    if args.plot:
        draw(rows, config).savefig(args.plot, dpi=160)
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Finds out now what would otherwise fail after minutes of training."""
    if args.steps < FEWEST_STEPS:
        raise ValueError(f"--steps must be at least {FEWEST_STEPS}, got {args.steps}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be at least 0 and below 2**32, got {args.seed}")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        check_output(option, path)
    if args.plot:
        from matplotlib.figure import Figure

        kinds = Figure().canvas.get_supported_filetypes()
        if args.plot.suffix.removeprefix(".").lower() not in kinds:
            raise ValueError(f"--plot {args.plot}: must end in one of .{', .'.join(sorted(kinds))}")


def _storages(name: str, rounding: str | None) -> tuple[Any, Any]:
    """How m and v are stored; the reference stays as it is."""
    import qstate

    mu, nu = qstate.storage(name)
    if rounding is not None and name != REFERENCE:
        mu = dataclasses.replace(mu, rounding=rounding)
        nu = dataclasses.replace(nu, rounding=rounding)
    return mu, nu


def _optimizer(name: str, storages: tuple[Any, Any], reset: str, config: "TrainConfig") -> Any:
    import qstate
    from qstate.optimizers import resets

    policies = None
    if reset != "none" and name != REFERENCE:  # the reference is plain AdamW
        # By the storage's name: with another rounding, the paper's periods are still its own.
        soft = qstate.theory(kind="soft")  # pyright: ignore[reportCallIssue]
        policies = resets(soft if reset == "soft" else reset, name)
    return qstate.adamw(
        config.learning_rate_schedule(),
        config.b1,
        config.b2,
        weight_decay=config.weight_decay,
        storage=storages,
        reset=policies,
        key=config.seed,
    )
