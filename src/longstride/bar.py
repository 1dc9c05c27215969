"""How far long work is: a bar on a terminal, a line for every tenth elsewhere."""

from contextlib import ExitStack
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from longstride.standard import StandardError

TENTHS = 10


class Bar:
    def __init__(self, console: Console, total: float = 1.0, line: str = "", shown: bool = True) -> None:
        """`shown` is False where what comes is shown itself."""
        self.console, self.total, self.shown = console, total, shown
        self.tenths = 0
        self.stack = ExitStack()
        self.live: Progress | None = None
        if shown and console.is_terminal:
            self.live = Progress(BarColumn(10), TextColumn("{task.fields[line]}"), console=console, transient=True)
            self.task = self.live.add_task("", total=total, line=line)

    def __enter__(self) -> Self:
        if self.live is not None:
            self.stack.enter_context(self.live)
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def show(self, done: float, line: str) -> None:
        tenths = int(done * TENTHS / self.total)
        if self.live is not None:
            self.live.update(self.task, completed=done, line=line)
        elif self.shown and tenths > self.tenths:
            self.tenths = tenths
            self.console.print(line, highlight=False, soft_wrap=True)


def byte_bar(shown: bool = True) -> Progress:
    """A bar on stderr for bytes that are read, written or downloaded; gone when they are. Only on a terminal."""
    console = StandardError()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
