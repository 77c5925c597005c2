"""Warnings that name the line of the user's code they are about."""

import sys
import warnings

_BETWEEN = frozenset({"qstate", "optax", "jax", "flax", "contextlib", "functools"})
"""Packages that may stand between a user and a warning: a chain, a trace, a training loop."""


def warn(message: str) -> None:
    """Warns, naming the line that led into the package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package(frame) -> str:
    return frame.f_globals.get("__name__", "").split(".")[0]
