"""Standard streams that may be closed, and the progress of long tasks on stderr."""

import io
import os
import sys
from time import perf_counter
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as LiveProgress

from longstride.common.checks import printable


def silence(stream: IO[Any]) -> None:
    """Redirects a stream to /dev/null. Otherwise Python would flush it again at exit and report the broken pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StandardError(Console):
    """Console on stderr. A broken pipe silences it, a full disk takes the line, and neither stops the program."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr or io.StringIO())  # sys.stderr is None if it was closed.

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*(printable(x, kept="\n\t") if isinstance(x, str) else x for x in objects), **options)
        except OSError:
            self.quiet = True
            super().print()  # Drops what could not be written; rich would keep it.
            self.quiet = False

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


TENTHS = 10


class Progress:
    """Progress of a long task on stderr: one live line with a bar on a terminal, plain lines for logs elsewhere.

    Use it as a context. The line has the work done, the rate and the time left:

        with Progress(total, name="enwik8") as progress:
            progress.advance(4096)      # enwik8  4,096 of 100,000,000 bytes  20,000,000 bytes/s  0:05 left
    """

    def __init__(
        self, total: float, console: Console | None = None, *, name: str = "", done: int = 0, steps: bool = False,
        shown: bool = True, plain_lines: bool = True,
    ) -> None:  # fmt: skip
        """total: bytes, or steps if `steps`; done: how many of them were done before.
        shown: False shows nothing, such as where the results themselves go to the terminal.
        plain_lines: without a terminal, print a line per tenth of `total`; for steps, only those that `log` is given.
        """
        self.total, self.console, self.steps = total, console or StandardError(), steps
        self.name = printable(name)  # It may be the name of a file.
        self.done: float = done
        self.start = done
        self.note = ""
        self.plain_lines = shown and plain_lines
        self.tenths = 0
        self.begun = perf_counter()
        self.ended: float | None = None
        self.live: LiveProgress | None = None
        if shown and self.console.is_terminal:
            columns = (BarColumn(10), TextColumn("{task.fields[line]}", markup=False))
            self.live = LiveProgress(*columns, console=self.console, transient=not steps)
            self.task = self.live.add_task("", total=total, completed=done, line=self.line)

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = perf_counter()
        if self.live is not None:
            self.live.stop()

    @property
    def seconds(self) -> float:
        return (perf_counter() if self.ended is None else self.ended) - self.begun

    @property
    def rate(self) -> float:
        """Bytes or steps per second."""
        return (self.done - self.start) / max(self.seconds, 1e-9)

    def advance(self, amount: float) -> None:
        self.update(self.done + amount)

    def update(self, done: float, note: str | None = None) -> None:
        """Shows that `done` of the total is done. `note` replaces the rate, here and in later lines."""
        self.done, self.note = done, self.note if note is None else note
        tenths = int(done * TENTHS / self.total) if self.total else TENTHS
        if self.live is not None:
            self.live.update(self.task, completed=done, line=self.line)
        elif self.plain_lines and not self.steps and tenths > self.tenths:
            self.tenths = tenths
            self.say(self.line)

    def log(self, step: int, note: str) -> None:
        """Shows a step and a note; without a terminal as a line of its own."""
        self.update(step, note)
        if self.live is None and self.plain_lines:
            self.say(f"step {self.line}")

    def say(self, text: str) -> None:
        """Prints a line; on a terminal above the bar."""
        print_line(self.console, text)

    @property
    def line(self) -> str:
        if self.steps:
            return f"{self.done:.0f}/{self.total:.0f}  {self.note}"
        left = f"{format_duration(max(0, self.total - self.done) / self.rate)} left" if self.rate > 0 else ""
        rate = self.note or f"{self.rate:,.0f} bytes/s"
        parts = (self.name, f"{self.done:,.0f} of {self.total:,.0f} bytes", rate, left)
        return "  ".join(part for part in parts if part)

    def summary(self) -> str:
        return f"{with_noun(round(self.done), 'byte')} in {format_duration(self.seconds)}, {self.rate:,.0f} bytes/s"


def print_line(console: Console, text: str) -> None:
    """Prints text as it is: no markup, no colours for numbers, no line breaks at the terminal's width."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def format_count(x: float) -> str:
    """Formats a count with a metric prefix: 12,300 is "12.3 k"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.1f} {letter}"
    return f"{x:.0f} "


def format_duration(seconds: float) -> str:
    """Formats seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def with_noun(count: int, noun: str) -> str:
    """A count with its noun: 1 step, 2,000 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
