"""Results of `longstride reproduce`: rows, what follows from their validations, and reading them from a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from longstride.commands.bench.records import read_list, read_machine, read_record
from longstride.common.files import read_json


@dataclass(frozen=True)
class ScoreRow:
    """Bits per byte of a split, at one least context."""

    min_context: int
    bits_per_byte: float
    bytes: int
    windows: int
    seconds: float


@dataclass(frozen=True)
class RowResult:
    """A network that was trained, or is being trained. None where something is not known."""

    name: str
    seed: int = 0
    data: str = ""
    """text or images: rows of one kind are compared."""
    pattern: str = ""
    context: int = 0
    batch: int = 0
    parameters: int = 0
    steps: int = 0
    """Steps that were taken."""
    step_seconds: float | None = None
    """Median time of a step, without compilation, validation and checkpoints."""
    wall_seconds: float = 0.0
    """Time of all calls that trained or scored the row, with everything."""
    memory_gib: float | None = None
    """Peak of tensors on the GPU."""
    validation_steps: list[float] = field(default_factory=list)
    validation_bits: list[float] = field(default_factory=list)
    """Bits per byte of a fixed part of the validation data, after these steps."""
    scores: list[ScoreRow] = field(default_factory=list)
    machine: dict[str, str | int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """What the row was asked for; another call must ask for the same."""
    command: str = ""
    """The command of longstride train that has the same settings."""
    done: int = 0
    """1 if the row is trained and scored."""
    failure: str | None = None

    @property
    def bytes(self) -> int:
        """Training bytes."""
        return self.steps * self.batch * self.context

    @property
    def seconds(self) -> float | None:
        """Training time: the steps at their median time."""
        return None if self.step_seconds is None else self.steps * self.step_seconds

    @property
    def bits(self) -> float | None:
        """Bits per byte at the last least context."""
        return self.scores[-1].bits_per_byte if self.scores else None

    def bits_at_bytes(self, count: float) -> float | None:
        """Validation bits after so many training bytes, read off the curve."""
        return self._bits_at_step(count / (self.batch * self.context)) if self.batch else None

    def bits_at_seconds(self, seconds: float) -> float | None:
        return self._bits_at_step(seconds / self.step_seconds) if self.step_seconds else None

    def _bits_at_step(self, step: float) -> float | None:
        """Linear between two validations; None before the first and after the last."""
        points = list(zip(self.validation_steps, self.validation_bits))
        step = round(step, 6)
        if points and step == points[0][0]:
            return points[0][1]
        for (before, high), (after, low) in pairwise(points):
            if before < step <= after:
                return high + (low - high) * (step - before) / (after - before)
        return None


@dataclass(frozen=True)
class Reproduced:
    """Results of an experiment."""

    experiment: str
    command: str
    """Of the last call."""
    rows: list[RowResult] = field(default_factory=list)

    def find(self, name: str, seed: int) -> RowResult | None:
        return next((row for row in self.rows if (row.name, row.seed) == (name, seed)), None)

    def put(self, row: RowResult, order: Sequence[str]) -> None:
        """Adds the row, or replaces that of its name and seed. `order`: names of rows as the experiment has them."""
        others = [other for other in self.rows if (other.name, other.seed) != (row.name, row.seed)]
        places = {name: place for place, name in enumerate(order)}
        self.rows[:] = sorted([*others, row], key=lambda one: (places.get(one.name, len(places)), one.seed))


@dataclass(frozen=True)
class Budget:
    """What all finished rows of one kind of data have had: the fewest bytes, and the shortest time."""

    bytes: int
    seconds: float | None
    """None where the time of steps is not known, as for runs that shared a GPU."""


def budget_of(rows: Sequence[RowResult]) -> Budget | None:
    """None if no row is done."""
    done = [row for row in rows if row.done and row.bytes]
    times = [row.seconds for row in done if row.seconds]
    return Budget(min(row.bytes for row in done), min(times, default=None)) if done else None


def read_results(path: Path, experiment: str | None = None) -> Reproduced:
    """Reads a file of `longstride reproduce`. `experiment`: the one that it must have."""
    content = read_json(path)
    try:
        rows = [_read_row(row) for row in read_list(content.get("rows"))]
        found = Reproduced(str(content["experiment"]), str(content.get("command", "")), rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"reproduce: {str(path)!r} is no file of longstride reproduce: {error}") from None
    if experiment not in (None, found.experiment):
        raise ValueError(f"reproduce: {path} has {found.experiment}, and {experiment} is asked for")
    return found


def _read_row(given: Any) -> RowResult:
    if not isinstance(given, dict):
        raise ValueError(f"a row must be an object, got {given!r:.80}")
    special = {
        "machine": read_machine(given.get("machine", {})),
        "scores": [read_record(ScoreRow, score) for score in read_list(given.get("scores", []))],
        "settings": dict(given.get("settings") or {}),
    }
    return RowResult(**{**vars(read_record(RowResult, {k: v for k, v in given.items() if k not in special})), **special})
