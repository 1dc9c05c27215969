"""metrics.jsonl, a run's log: one line of JSON per logged step.

A run that stopped after its last checkpoint repeats some steps when it is resumed. Their lines are removed from
metrics.jsonl then, and kept in metrics-to-step-N.jsonl until the run has reached step N again.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from longstride.common.atomic import add_path_to_errors, atomic_path
from longstride.common.checks import whole_number
from longstride.common.files import open_inside, open_regular, parse_object

NAME = "metrics.jsonl"
BACKUP = re.compile(r"metrics-to-step-(\d{1,18})\.jsonl")
LONGEST = 2**16
"""The most bytes of a line."""
LARGEST = 2**28
"""The most bytes of a file that is read at once. Resuming reads line by line."""
MOST = 1e100
"""The largest absolute value; those of training are float32."""

Row = dict[str, Any]


class Metrics:
    """The log of one run, and the backup of lines for steps that are repeated."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._backups: dict[int, Path] | None = None

    def last_step(self) -> int:
        """Returns the largest logged step; 0 if there is none."""
        return max((row["step"] for row in iterate(self.path)), default=0) if self.path.exists() else 0

    def last_values(self, *names: str) -> dict[str, float]:
        """Returns the last logged value of each metric that has one."""
        rows = iterate(self.path) if self.path.exists() else ()
        return {name: row[name] for row in rows for name in names if row.get(name) is not None}

    def append(self, row: Row) -> None:
        """Appends a line and flushes it to the disk. NaN and infinity are no JSON and become null."""
        row = {name: value if not isinstance(value, float) or isfinite(value) else None for name, value in row.items()}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with add_path_to_errors(self.path), os.fdopen(open_inside(self.path, flags), "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for step, path in self._backup_files().items():
            if step <= row["step"]:
                path.unlink(missing_ok=True)
                self._backups = None

    def truncate_after(self, step: int) -> Path | None:
        """Removes the lines of later steps, which will be repeated. Returns the backup file that has them, or None."""
        if not self.path.exists():
            return None
        last, backups, file = self.last_step(), self._backup_files(), None
        if last > max(step, *backups, 0):  # Otherwise a backup already has these steps.
            file = self.path.with_name(f"metrics-to-step-{last}.jsonl")
            self._copy(file, last)
            for path in backups.values():
                path.unlink(missing_ok=True)
            self._backups = None
        self._copy(self.path, step)
        return file or next(iter(self._backup_files().values()), None)

    def _copy(self, path: Path, last: int) -> None:
        """Writes the lines up to a step to `path`, without an incomplete last line."""
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.writelines(line for line, row in _lines(self.path) if row["step"] <= last)

    def _backup_files(self) -> dict[int, Path]:
        """Returns the backup files by their last step. Reads the folder once."""
        if self._backups is None:
            names = {path: BACKUP.fullmatch(path.name) for path in self.path.parent.iterdir()}
            self._backups = {int(name[1]): path for path, name in names.items() if name}
        return self._backups


def check_has_metrics(folder: str | Path) -> Path:
    """Returns the path of a run's metrics; ValueError if it has none."""
    path = Path(folder) / NAME
    if not path.is_file():
        if (Path(folder) / "run.json").is_file():
            raise ValueError(f"{folder} has no {NAME} yet: the run has not logged a step")
        if not Path(folder).exists():
            raise ValueError(f"{folder} is no run: there is no such folder; longstride runs lists those here")
        raise ValueError(f"{folder} is no run: it has no {NAME}")
    return path


def read_metrics(folder: str | Path) -> list[Row]:
    """Returns the rows of a run's metrics, without an incomplete last line."""
    path = check_has_metrics(folder)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; at most {LARGEST:,} are read as a whole")
    return list(iterate(path))


def iterate(path: Path) -> Iterator[Row]:
    """Yields the rows of a metrics file."""
    for _, row in _lines(path):
        yield row


def _lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    line_number = 0
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        while line := file.readline(LONGEST + 1):
            line_number += 1
            owner = f"{path} is damaged: line {line_number}"
            try:
                if len(line) > LONGEST:
                    raise ValueError(f"{owner} has more than {LONGEST:,} bytes")
                row = _row(line, owner) if line.endswith(b"\n") else None
            except ValueError as error:
                way = f"remove that line to go on without it: sed -i {line_number}d {shlex.quote(str(path))}"
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
