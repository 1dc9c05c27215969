"""A run's folder: whose it is, and what is written there as training goes on.

config.json          all that the run depends on
metrics.jsonl        a line for each logged step
checkpoints/step-N/  to resume from
.lock                held by the process that trains
launch.txt           which launch of torchrun that belongs to
model.safetensors    the best weights so far, by validation; `SparseTransformer.from_pretrained(RUN)` loads them
"""

import json
import os
import re
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from longstride.atomic import atomic_path
from longstride.data.store import Store
from longstride.training.config import TrainConfig
from longstride.training.lock import NAME as LOCK
from longstride.training.lock import Lock

FREE = {
    "out", "data", "validate_every", "save_every", "keep", "log_every", "tensorboard", "device", "patience", "accumulate",
    "parallel", "averaging", "compile",
}  # fmt: skip
"""Fields that may differ when a run is resumed, on another machine say: none changes what a step computes, but for rounding
and the masks of dropout. Data may lie elsewhere, not differ."""


LAUNCH, LAUNCH_ID = "launch.txt", "TORCHELASTIC_RUN_ID"
"""Which launch of torchrun has the run, so that one that it starts anew goes on with it by itself."""

HALF = re.compile(r"\.[a-z-]+\.\d+\.(json|jsonl|safetensors|png|txt|wav)")
"""Files that a process was killed while it wrote, as `atomic_path` names them."""


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.checkpoints = folder / "checkpoints"
        self._lock: Lock | None = None

    @classmethod
    def new(cls, config: TrainConfig) -> "Run":
        """For a run that begins: the folder must not hold anything yet. Nothing is written before `begin`."""
        run = cls(_folder(config))
        if (run.folder / "config.json").exists():
            raise ValueError(
                f"train: {run.folder} already holds a run; add --resume to go on with it, or give another --out"
            )
        if run.folder.exists() and (not run.folder.is_dir() or any(not _is_left(path) for path in run.folder.iterdir())):
            raise ValueError(f"train: {run.folder} is not an empty folder; give another --out")
        return run

    @classmethod
    def resumed(cls, config: TrainConfig) -> "Run":
        run = cls(_folder(config))
        path = run.folder / "config.json"
        if not path.is_file():
            raise ValueError(f"train: {run.folder} holds no run to resume; leave --resume out to begin one")
        saved = TrainConfig.from_json(path.read_text(errors="replace"), str(path))
        for field in fields(TrainConfig):
            before, now = getattr(saved, field.name), getattr(config, field.name)
            if field.name not in FREE and before != now:
                raise ValueError(f"train: {field.name} {_difference(before, now)}; a run is resumed with what it began with")
        return run

    @staticmethod
    def is_of_this_launch(config: TrainConfig) -> bool:
        """Whether torchrun has begun the run with processes that it had started before these."""
        path = _folder(config) / LAUNCH
        return LAUNCH_ID in os.environ and path.is_file() and path.read_text(errors="replace") == os.environ[LAUNCH_ID]

    def lock(self) -> None:
        """Keeps other processes out, until `unlock`."""
        if self._lock is None:
            self._lock = Lock(self.folder)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_data(self, store: Store) -> None:
        """Whether these are the bytes that the run began with."""
        path = self.folder / "data.json"
        try:
            before = dict(json.loads(path.read_text())["splits"]) if path.exists() else {}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"train: {path} is damaged: {error}; give the same --data, and remove that file") from None
        for name, size in store.splits.items():
            if name in before and before[name] != {"bytes": size, "sha256": store.sha256[name]}:
                raise ValueError(
                    f"train: {store.folder} has other bytes in {name} than {self.folder} began with; give the same --data"
                )

    def begin(self, config: TrainConfig, store: Store) -> None:
        if self._lock is None:  # A new one, unless another process was faster.
            self.lock()
            Run.new(config)
        with atomic_path(self.folder / LAUNCH) as path:
            path.write_text(os.environ.get(LAUNCH_ID, ""))
        for path in self.folder.iterdir():
            if HALF.fullmatch(path.name):
                path.unlink()
        config = replace(config, data=str(Path(config.data).expanduser().absolute()))  # So that it is found from any folder.
        for name, text in (("data.json", store.to_json()), ("config.json", config.to_json())):
            with atomic_path(self.folder / name) as path:
                path.write_text(text)

    def forget_after(self, step: int) -> None:
        """Removes the lines of steps that will be done once more."""
        if self.metrics.exists():
            kept = [row for row in read_metrics(self.folder) if row["step"] <= step]
            with atomic_path(self.metrics) as path:
                path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))

    def log(self, row: dict[str, Any]) -> None:
        """What is not finite is no JSON, and is written as null."""
        row = {name: value if not isinstance(value, float) or isfinite(value) else None for name, value in row.items()}
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics. The last one is left out if the machine failed while it was written."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} is no run: it has no metrics.jsonl")
    whole = path.read_text(errors="replace").split("\n")[:-1]
    try:
        return [json.loads(line) for line in whole]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _is_left(path: Path) -> bool:
    """Whether that is all there is of a run which was killed as it began."""
    return path.name in (LOCK, LAUNCH, "data.json") or HALF.fullmatch(path.name) is not None


def _folder(config: TrainConfig) -> Path:
    if not config.out:
        raise ValueError("train: --out must be given: the folder of the run")
    return Path(config.out)


def _difference(before: Any, now: Any) -> str:
    if hasattr(before, "__dataclass_fields__"):
        for field in fields(before):
            if getattr(before, field.name) != getattr(now, field.name):
                return f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
    return f"was {before!r} and is now {now!r}"
