"""Warnings that name the line of the user's code they are about."""

import pathlib
import sys
import warnings

_PACKAGE = str(pathlib.Path(__file__).parent.parent)


def warn(message: str) -> None:
    """Warns, naming the line that called into the package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
