"""metrics.jsonl, a run's log: a line of JSON for each logged step.

A run that stopped after its last checkpoint does some steps once more. The lines of these steps are removed from
metrics.jsonl when it goes on, and kept in metrics-to-step-N.jsonl until it has reached step N again.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from longstride.common.atomic import atomic_path, naming
from longstride.common.checks import whole_number
from longstride.common.files import open_inside, open_regular, parse_object

NAME = "metrics.jsonl"
KEPT = re.compile(r"metrics-to-step-(\d{1,18})\.jsonl")
LONGEST = 2**16
"""Bytes of a line."""
LARGEST = 2**28
"""Bytes of a file that is read as a whole; to go on with a run, lines are read one by one."""
MOST = 1e100
"""The largest value that is drawn; those of training are float32."""

Row = dict[str, Any]


class Metrics:
    """Of one run: what is appended to, and what is kept of steps that are done once more."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._kept: dict[int, Path] | None = None

    def last_step(self) -> int:
        """The largest that is logged; 0 if there is none."""
        return max((row["step"] for row in iterate(self.path)), default=0) if self.path.exists() else 0

    def last_values(self, *names: str) -> dict[str, float]:
        """The last value of each, where there is one."""
        rows = iterate(self.path) if self.path.exists() else ()
        return {name: row[name] for row in rows for name in names if row.get(name) is not None}

    def append(self, row: Row) -> None:
        """What is not finite is no JSON, and is written as null."""
        row = {name: value if not isinstance(value, float) or isfinite(value) else None for name, value in row.items()}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with naming(self.path), os.fdopen(open_inside(self.path, flags), "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for step, path in self._kept_files().items():
            if step <= row["step"]:
                path.unlink(missing_ok=True)
                self._kept = None

    def forget_after(self, step: int) -> Path | None:
        """Removes the lines of later steps, which will be done once more. Where they are kept, if there are any."""
        if not self.path.exists():
            return None
        last, kept, file = self.last_step(), self._kept_files(), None
        if last > max(step, *kept, 0):  # Else there is a file with these steps, and more.
            file = self.path.with_name(f"metrics-to-step-{last}.jsonl")
            self._copy(file, last)
            for path in kept.values():
                path.unlink(missing_ok=True)
            self._kept = None
        self._copy(self.path, step)
        return file or next(iter(self._kept_files().values()), None)

    def _copy(self, path: Path, last: int) -> None:
        """Writes the lines up to that step. One that was cut short is left out."""
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.writelines(line for line, row in _lines(self.path) if row["step"] <= last)

    def _kept_files(self) -> dict[int, Path]:
        """By the last step that each has. The folder is read once."""
        if self._kept is None:
            names = {path: KEPT.fullmatch(path.name) for path in self.path.parent.iterdir()}
            self._kept = {int(name[1]): path for path, name in names.items() if name}
        return self._kept


def read_metrics(folder: str | Path) -> list[Row]:
    """The lines of a run's metrics. The last one is left out if the machine failed while it was written."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise ValueError(f"{folder} is no run: it has no {NAME}")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; at most {LARGEST:,} are read as a whole")
    return list(iterate(path))


def iterate(path: Path) -> Iterator[Row]:
    """The same, line by line."""
    for _, row in _lines(path):
        yield row


def _lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    number = 0
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        while line := file.readline(LONGEST + 1):
            number += 1
            owner = f"{path} is damaged: line {number}"
            try:
                if len(line) > LONGEST:
                    raise ValueError(f"{owner} has more than {LONGEST:,} bytes")
                row = _row(line, owner) if line.endswith(b"\n") else None
            except ValueError as error:
                way = f"remove that line to go on without it: sed -i {number}d {shlex.quote(str(path))}"
                raise ValueError(f"{error}; {way}") from None
            if row is not None:
                yield line, row


def _row(line: bytes, owner: str) -> Row:
    row = parse_object(line.decode(errors="replace"), owner)
    whole_number(owner, "step", row.get("step"), 0)
    for name, value in row.items():
        if value is not None and not (isinstance(value, int | float) and abs(value) <= MOST):
            raise ValueError(f"{owner}: {name[:80]!r} must be a number of at most {MOST:g} or null, got {str(value)[:80]!r}")
    return row
