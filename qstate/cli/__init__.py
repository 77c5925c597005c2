"""The command `qstate`: `demo` trains a small model, `plan` prints periods and probabilities."""

import argparse
import importlib.metadata

from qstate.cli import _demo, _plan


def _version() -> str:
    try:
        return importlib.metadata.version("qstate")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def main(argv: list[str] | None = None) -> int:
    """Runs `qstate`.

    Args:
      argv: the arguments after the program's name; None for those of the process.

    Returns:
      The exit status: 0, or 2 for arguments that cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="qstate",
        description="Optimizer state in few bits: see what it costs, plan when to reset it.",
    )
    parser.add_argument("--version", action="version", version=f"qstate {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _demo.add_parser(subparsers)
    _plan.add_parser(subparsers)
    args = parser.parse_args(argv)
    return args.func(args)
