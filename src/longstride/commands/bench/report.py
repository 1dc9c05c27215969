"""Output of the benchmarks: results as JSON, tables and pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from json import dumps, loads
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from longstride.commands.bench.settings import Benchmark
from longstride.common.atomic import atomic_path
from longstride.common.checks import short_reason


def prepare_drawing(settings: Benchmark, plot: str) -> Callable[..., None]:
    """Returns a function that draws the results, if a picture is asked for, and names the files that were written.

    Called before the measurement, which would be lost if matplotlib is not installed. `plot`: a function of
    longstride.pictures.benchmarks.
    """
    write = None if settings.picture is None else getattr(import_module("longstride.pictures.benchmarks"), plot)

    def draw(*results: Any) -> None:
        if settings.json is not None and getattr(settings, "read", None) is None:
            print(f"wrote {settings.json}")
        if write is not None:
            write(*results)
            print(f"wrote {settings.picture}")

    return draw


def check_some_ran(owner: str, failures: Sequence[str | None]) -> None:
    """Raises ValueError if every measurement failed, so that the command does not end as if it had measured something."""
    if all(failures):
        reason = f"nothing could be measured: {failures[0]}" if failures else "there are no results"
        raise ValueError(f"{owner}: {reason}")


def save(result: Any, path: Path | None) -> None:
    """Writes a dataclass as JSON, if there is a path."""
    if path is not None:
        with atomic_path(path) as temporary:
            temporary.write_text(dumps(plain(result), indent=2) + "\n")


def plain(value: Any) -> Any:
    """A dataclass as JSON has it: objects, lists, and paths as text."""
    return loads(dumps(asdict(value), default=str))


def print_table(
    console: Console, title: str, names: Sequence[str], headings: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """A table with a bold title above it. `names` are the headings of columns of text, `headings` those of numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (*names, *headings):
        # Where the console is narrow, names are folded and numbers stay whole.
        justify: JustifyMethod = "left" if heading in names else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading not in names)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)


def print_machine(console: Console, machine: Mapping[str, str | int], rates: str) -> None:
    print_lines(console, [", ".join(f"{name} {value}" for name, value in machine.items()), rates])


def print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def reason_of(error: Exception) -> str:
    """The kind of an error and its message, in one line."""
    kind, message = type(error).__name__, short_reason(error)
    return kind if message == kind else f"{kind}: {message}"
