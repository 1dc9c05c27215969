"""The folder of a run, and the files that training writes there.

run.json             the run's id, which its checkpoints repeat; its preset; the path and hash of its initial weights
config.json          all settings (TrainConfig)
metrics.jsonl        one line per logged step
checkpoints/step-N/  state to resume from
.lock                held by the process that trains
launch.txt           id of the torchrun launch that trains it
model.safetensors    the best weights so far, by validation; `SparseTransformer.from_pretrained(RUN)` loads them

Nothing in the folder may be a link: writes and removals would reach files elsewhere.
"""

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from torch import Tensor

from longstride.common.atomic import atomic_path, is_temporary
from longstride.common.checks import finite_number, short_reason, short_repr, whole_number
from longstride.common.files import read_json, read_text, real_path
from longstride.data.store import Store
from longstride.model.pretrained import save_weights
from longstride.model.shipped import find_model
from longstride.training.config import Resume, TrainConfig
from longstride.training.folder import LAUNCH, RUN, check_free, check_holds_run
from longstride.training.lock import Lock
from longstride.training.metrics import Metrics

CHANGEABLE = {
    "out", "data", "validate_every", "save_every", "keep", "log_every", "tensorboard", "device", "patience", "accumulate",
    "parallel", "averaging", "compile", "capture", "gpu_memory",
}  # fmt: skip
"""Fields that may change when a run is resumed: they do not change what a step computes, except rounding and dropout masks.
The data may be at another path but must have the same bytes."""
WEIGHTS = "model.safetensors"
LAUNCH_ID = "TORCHELASTIC_RUN_ID"
"""Identifies the launch of torchrun, so that processes that it restarts resume the run by themselves."""
UNNAMED = ("", "none")
"""Values of the variable for launches without an id."""


class Run:
    def __init__(self, folder: Path, run_id: str | None = None, preset: str = "") -> None:
        """`run_id`: runs of earlier versions have none. `preset`: the preset that the run begins with, if any."""
        self.folder, self.id, self.preset = folder, run_id, preset
        self.steps_before: int | None = None
        """The run's total of steps before it was extended; None if it is not extended."""
        self.data_before = ""
        """Path of the data that the run began with; empty for a new run."""
        self.metrics = Metrics(folder)
        self.checkpoints = folder / "checkpoints"
        self._lock: Lock | None = None
        self._initial: dict[str, Any] = {}

    @classmethod
    def new(cls, config: TrainConfig, preset: str = "") -> "Run":
        """Makes a new run; ValueError if the folder is not empty. Writes nothing before `begin`."""
        run = cls(config.folder(), uuid4().hex, preset)
        check_free(run.folder)
        return run

    @classmethod
    def resumed(cls, config: TrainConfig, preset: str = "") -> "Run":
        """Opens the run in the folder; ValueError if it began with other settings, or with another preset."""
        folder = config.folder()
        check_holds_run(folder)
        path = folder / "config.json"
        _check_preset(folder, preset)
        saved, config = TrainConfig.read(path), _with_absolute_paths(config)
        for field in fields(TrainConfig):
            before, now = getattr(saved, field.name), getattr(config, field.name)
            if field.name not in CHANGEABLE and before != now and not (field.name == "steps" and now > before):
                rule = "a run is resumed with what it began with" if field.name != "steps" else "it can be more, not less"
                raise ValueError(f"train: {field.name} {_difference(before, now)}; {rule}")
        run = cls(folder, read_id(folder))
        run.data_before = saved.data
        run.steps_before = saved.steps if config.steps > saved.steps else None
        return run

    @staticmethod
    def exists(config: TrainConfig) -> bool:
        """Whether the folder holds a run."""
        return (config.folder() / "config.json").exists()

    @staticmethod
    def is_of_this_launch(config: TrainConfig) -> bool:
        """Whether this launch of torchrun began the run, before a restart."""
        path = config.folder() / LAUNCH
        return _launch() != "" and path.is_file() and read_text(path) == _launch()

    def lock(self) -> None:
        """Locks the folder for this process, until `unlock`."""
        if self._lock is None:
            self._lock = Lock(self.folder)

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_data(self, store: Store) -> None:
        """Raises ValueError if the store has other bytes than the run to resume began with."""
        if (split := self.changed_split(store)) is None:
            return
        other = "give another --out for a new run"
        fix = "leave --data out" if Path(self.data_before).exists() else "give a copy of that"
        if real_path(store.shown) == real_path(self.data_before):
            raise ValueError(
                f"train: {store.shown} has other bytes in {split} than when {self.folder} began; bring them back from a "
                f"copy, or {other}"
            )
        raise ValueError(
            f"train: data = {str(store.shown)!r} has other bytes in {split} than {self.folder} began with, "
            f"{self.data_before}; {fix}, or {other}"
        )

    def changed_split(self, store: Store) -> str | None:
        """Returns a split of the store that has other bytes than the run began with; None if there is none."""
        path = self.folder / "data.json"
        try:
            before = dict(read_json(path)["splits"]) if path.exists() else {}
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"train: {path} is damaged: {error}; give the same --data, and remove that file") from None
        for name, size in store.splits.items():
            if name in before and before[name] != {"bytes": size, "sha256": store.sha256[name]}:
                return name
        return None

    def record_initial_weights(self, record: dict[str, str]) -> None:
        """Records the initial weights for run.json. A run that starts again from step 0 must get the same ones."""
        path = self.folder / RUN
        before = read_json(path).get("init_from") if path.exists() and self._lock is not None else None
        if isinstance(before, dict) and before.get("sha256") != record["sha256"]:
            raise ValueError(
                f"train: init_from = {record['path']!r} has other weights than {self.folder} began with; bring these back, "
                "or give another --out"
            )
        self._initial = {"init_from": record}

    def begin(self, config: TrainConfig, store: Store) -> None:
        """Locks the folder of a new run, and writes its JSON files."""
        if self._lock is None:  # A new one, unless another process was faster.
            self.lock()
            Run.new(config)
            known = {"preset": self.preset} if self.preset else {}
            self._write(RUN, json.dumps({"version": 1, "id": self.id, **known, **self._initial}) + "\n")
        self._write(LAUNCH, _launch())
        for path in self.folder.iterdir():
            if is_temporary(path.name):
                path.unlink()
        self._write("data.json", store.to_json())
        self._write("config.json", _with_absolute_paths(config).to_json())

    def prepare_resume(self, step: int, may_begin_anew: bool, say: Callable[[str], None]) -> None:
        """Prepares to resume after `step`: removes the metrics of later steps. -1: there is no checkpoint, and the run
        starts again from step 0; ValueError if it has results, whose checkpoint somebody must have removed."""
        if step < 0:
            last = self.metrics.last_step()
            if (self.folder / WEIGHTS).exists():
                raise ValueError(
                    f"train: {self.folder} has results, {WEIGHTS}, and no checkpoint to go on from; bring "
                    f"{self.checkpoints} back from a copy, or give another --out for a new run"
                )
            if last and not may_begin_anew:
                raise ValueError(
                    f"train: {self.folder} has results, metrics up to step {last}, and no checkpoint to go on from; "
                    "--resume auto begins it anew and keeps them under another name, or give another --out"
                )
        kept = self.metrics.truncate_after(max(step, 0))
        if step < 0:
            log = f"; its metrics so far are kept as {kept.name} until these steps are done once more" if kept else ""
            say(f"{self.folder} has no checkpoint, and begins anew{log}")

    def log(self, row: dict[str, Any]) -> None:
        self.metrics.append(row)

    def keep_best(self, weights: dict[str, Tensor], step: int, bits: float) -> None:
        """Writes the best weights so far. Those of a later step, to be repeated, are replaced only by better ones."""
        existing = self.best()
        if existing is None or existing[0] <= step or bits < existing[1]:
            save_weights(self.folder, weights, {"step": str(step), "bits_per_byte": repr(bits)})

    def weights_problem(self) -> str | None:
        """Returns why the file of the best weights cannot be read; None if it can."""
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt"):
                return None
        except (OSError, SafetensorError) as error:
            return "it is missing" if isinstance(error, FileNotFoundError) else short_reason(error)

    def best(self) -> tuple[int, float] | None:
        """Returns the step and bits per byte of the existing weights, if their file has them."""
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as file:
                about = file.metadata() or {}
            return whole_number("", "", int(about["step"]), 0), finite_number("", "", float(about["bits_per_byte"]))
        except (OSError, LookupError, ValueError, SafetensorError):
            return None

    def _write(self, name: str, text: str) -> None:
        with atomic_path(self.folder / name) as path:
            path.write_text(text)


def read_id(folder: Path) -> str | None:
    """Returns the id of the run in a folder; None for runs of earlier versions."""
    path = folder / RUN
    if not path.exists():
        return None
    run_id = read_json(path).get("id")
    if not isinstance(run_id, str) or not re.fullmatch("[0-9a-f]{32}", run_id):
        raise ValueError(f"{path} is damaged: it has no id of a run; bring it back from a copy")
    return run_id


def _check_preset(folder: Path, preset: str) -> None:
    """Raises ValueError if the run began with another preset. Runs of earlier versions do not say which."""
    began = read_json(folder / RUN).get("preset") if (folder / RUN).exists() else None
    if preset and isinstance(began, str) and began != preset:
        raise ValueError(
            f"train: {folder} began with the preset {short_repr(began)}, and {short_repr(preset)} is given; give the same, "
            "or another --out for a new run"
        )


def check_resume(resume: Resume) -> Resume:
    if resume not in (True, False, "auto"):
        raise ValueError(f"train: resume must be True, False or 'auto', got {resume!r}")
    return resume


def _launch() -> str:
    """Returns the name of this launch of torchrun, unchanged by restarts; empty without torchrun."""
    name = os.environ.get(LAUNCH_ID)
    if name is None:
        return ""
    return name if name not in UNNAMED else f"process {os.getppid()} on {socket.gethostname()}"


def _with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Returns the config with absolute paths, so that they are valid from any working directory."""
    data = str(Path(config.data).expanduser().absolute())
    initial = str(find_model(Path(config.init_from).expanduser()).absolute()) if config.init_from else ""
    return replace(config, data=data, init_from=initial)


def _difference(before: Any, now: Any) -> str:
    if hasattr(before, "__dataclass_fields__"):
        for field in fields(before):
            if getattr(before, field.name) != getattr(now, field.name):
                return f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
    return f"was {before!r} and is now {now!r}"
