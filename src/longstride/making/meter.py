"""How far sampling is: a bar on a terminal, a line for every tenth elsewhere."""

from contextlib import ExitStack
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from longstride.training.progress import duration

TENTHS = 10


class Meter:
    """`shown` is False where what comes is shown itself."""

    def __init__(self, console: Console, total: int, shown: bool = True) -> None:
        self.console, self.total, self.shown = console, total, shown
        self.done = 0
        self.begun = perf_counter()
        self.ended: float | None = None
        self.tenths = 0
        self.stack = ExitStack()
        self.live: Progress | None = None
        if shown and console.is_terminal:
            self.live = Progress(BarColumn(10), TextColumn("{task.fields[line]}"), console=console, transient=True)
            self.task = self.live.add_task("sample", total=total, line="")

    def __enter__(self) -> "Meter":
        if self.live is not None:
            self.stack.enter_context(self.live)
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended = perf_counter()
        self.stack.close()

    @property
    def seconds(self) -> float:
        return (perf_counter() if self.ended is None else self.ended) - self.begun

    @property
    def rate(self) -> float:
        """Bytes a second, over all that are made together."""
        return self.done / max(self.seconds, 1e-9)

    def advance(self, made: int) -> None:
        self.done += made
        if not self.shown or not self.done:
            return
        left = duration((self.total - self.done) / self.rate)
        line = f"{self.done:,} of {self.total:,} bytes  {self.rate:,.0f} bytes/s  {left} left"
        if self.live is not None:
            self.live.update(self.task, completed=self.done, line=line)
        elif self.done * TENTHS // self.total > self.tenths:
            self.tenths = self.done * TENTHS // self.total
            self.console.print(line, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        return f"{self.done:,} bytes in {duration(self.seconds)}, {self.rate:,.0f} bytes/s"
