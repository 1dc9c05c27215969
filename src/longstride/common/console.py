"""Standard streams that may be closed, and progress on stderr: a bar on a terminal, one line per 10 % elsewhere."""

import io
import os
import sys
from contextlib import ExitStack
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from longstride.common.checks import printable


def silence(stream: IO[Any]) -> None:
    """Redirects a stream to /dev/null. Otherwise Python would flush it again at exit and report the broken pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StandardError(Console):
    """Console on stderr. A broken pipe silences it and does not stop the program."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr or io.StringIO())  # sys.stderr is None if it was closed.

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(x, kept="\n\t") if isinstance(x, str) else x for x in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


TENTHS = 10


class Bar:
    """Progress bar on a terminal; elsewhere one line per tenth of `total`."""

    def __init__(self, console: Console, total: float = 1.0, line: str = "", shown: bool = True) -> None:
        """`shown`: False where the results themselves go to the terminal."""
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
    """Returns a progress bar on stderr for bytes read, written or downloaded. Shown on a terminal only."""
    console = StandardError()
    columns = (
        TextColumn("{task.description}", markup=False),  # The names of files may have brackets.
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


def count(x: float) -> str:
    """Formats a count with a metric prefix: 12,300 is "12.3 k"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.1f} {letter}"
    return f"{x:.0f} "


def duration(seconds: float) -> str:
    """Formats seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
