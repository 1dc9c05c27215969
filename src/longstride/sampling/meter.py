"""How far sampling is, and how fast."""

from time import perf_counter
from typing import Any

from rich.console import Console

from longstride.common.console import Bar, duration


class Meter(Bar):
    def __init__(self, console: Console, total: int, shown: bool = True) -> None:
        super().__init__(console, total, shown=shown)
        self.done = 0
        self.begun = perf_counter()
        self.ended: float | None = None

    def __exit__(self, *_: Any) -> None:
        self.ended = perf_counter()
        super().__exit__()

    @property
    def seconds(self) -> float:
        return (perf_counter() if self.ended is None else self.ended) - self.begun

    @property
    def rate(self) -> float:
        """Bytes a second, over all that are made together."""
        return self.done / max(self.seconds, 1e-9)

    def advance(self, made: int) -> None:
        self.done += made
        if self.done:
            left = duration((self.total - self.done) / self.rate)
            line = f"{self.done:,} of {self.total:,.0f} bytes  {self.rate:,.0f} bytes/s  {left} left"
            self.show(self.done, line)

    def summary(self) -> str:
        return f"{self.done:,} bytes in {duration(self.seconds)}, {self.rate:,.0f} bytes/s"
