"""The command `qstate`: `demo` trains, `plan` prints periods, `bench` times optimizer steps."""

import argparse
import importlib.metadata
import os
import sys

from qstate.cli import _bench, _demo, _plan


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
    _bench.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status = args.func(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
