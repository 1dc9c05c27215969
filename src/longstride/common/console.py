"""Standard streams that may be closed, and progress on stderr: a bar on a terminal, a line for every tenth elsewhere."""

import io
import os
import sys
from contextlib import ExitStack
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def silence(stream: IO[Any]) -> None:
    """What waits in its buffer, and what comes, goes nowhere. Else Python would try once more as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StandardError(Console):
    """Where people see how far it is. If nobody reads it any more, the work goes on."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr or io.StringIO())  # It is None where it was closed.

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


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


def count(x: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.1f} {letter}"
    return f"{x:.0f} "


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
