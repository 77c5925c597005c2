"""How a command refuses arguments that it cannot use."""

import sys
from pathlib import Path


def refuse(command: str, reason: str) -> int:
    """Says why, and gives the exit status."""
    print(f"qstate {command}: {reason}", file=sys.stderr)
    return 2


def check_output(option: str, path: Path | None) -> None:
    """Finds out now what would otherwise fail when the file is written.

    Raises:
      ValueError: for what is no file in a directory that exists.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{option} {path}: not a file in a directory that exists")
