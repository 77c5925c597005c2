"""A table as text."""

from collections.abc import Sequence


def format_table(heading: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], left: int) -> str:
    """Aligned text: lines of heading, a rule, and a line a row.

    Args:
      heading: its lines, a cell a column.
      rows: cells of every row.
      left: how many columns, from the first on, have their text on the left; numbers follow.
    """
    table = [*heading, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    lines = [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True))
        for line in table
    ]
    rule = "-" * len(lines[0])
    lines = [*lines[: len(heading)], rule, *lines[len(heading) :]]
    return "\n".join(line.rstrip() for line in lines)
