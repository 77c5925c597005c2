"""Cells as aligned lines."""

from collections.abc import Sequence


def aligned(cells: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Lines of equal length, two spaces between columns.

    Args:
      cells: rows of the same number of cells, the heading first.
      texts: how many columns are set to the left; all others, numbers, are set to the right.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i < texts else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
