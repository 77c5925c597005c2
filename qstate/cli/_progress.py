"""One bar with what is done; nothing where nobody watches."""

import importlib.util


class Progress:
    """A progress bar on a terminal, if rich is installed.

    Args:
      total: steps until all is done.
      quiet: whether to show none.
      description: what is said until the first step is done.
    """

    def __init__(self, total: int, quiet: bool, description: str) -> None:
        self._bar = None
        if quiet or importlib.util.find_spec("rich") is None:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.progress import TimeRemainingColumn as TimeLeft

        columns = (
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeLeft(),
            TextColumn("{task.description}"),
        )
        console = Console()
        hidden = not console.is_terminal
        self._bar = Bar(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, description: str) -> None:
        """Steps done, and what to say beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=description)
