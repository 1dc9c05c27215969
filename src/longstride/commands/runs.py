"""The runs in a folder: step, best bits per byte, and state (running, done, stopped or damaged)."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from longstride.common.checks import printable, whole_number
from longstride.common.files import open_inside, read_json, read_text
from longstride.training.config import TrainConfig
from longstride.training.lock import NAME as LOCK
from longstride.training.metrics import NAME as METRICS
from longstride.training.metrics import iterate

LEVELS = 2
"""Levels of folders that are searched for runs."""
MOST_FOLDERS = 10_000
"""The most folders that are searched."""
LONGEST_STEP = 20
"""The most digits of a step in the name of a checkpoint."""
SHOWN = 60
"""The most characters of a problem in a line."""
WIDE = 1e4
"""Bits per byte from which on an exponent is shorter."""


@dataclass(frozen=True)
class RunState:
    folder: Path
    changed: float
    """Time of the last write to its metrics or config, in seconds since 1970."""
    state: str
    """running, done, stopped or damaged."""
    step: int = 0
    steps: int = 0
    best: float | None = None
    """Bits per byte of the best validation."""
    problem: str = ""
    """Why it is damaged."""


def list_runs(folder: Path) -> list[RunState]:
    """The runs in a folder and its subfolders, newest first. Does not follow links."""
    if not folder.is_dir():
        raise ValueError(f"runs: {folder} is no folder; give the folder that has the runs")
    return sorted((read_state(run) for run in _folders(folder, LEVELS)), key=lambda run: run.changed, reverse=True)


def show_runs(folder: Path) -> None:
    """Prints a line for each run."""
    runs = list_runs(folder)
    if not runs:
        print(f"{printable(str(folder))} has no runs; longstride train makes one")
        return
    rows = [("run", "step", "bits per byte", "state", "changed"), *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        name, step, best, state = (text.ljust(width) for text, width in zip(row, widths))
        print(f"{name}  {step}  {best}  {state}  {row[4]}")


def read_state(folder: Path) -> RunState:
    """Never raises for a bad file: a run that cannot be read is damaged."""
    changed = max(_modified(folder / name) or 0.0 for name in ("config.json", METRICS))
    try:
        if not (folder / "config.json").exists():
            raise ValueError("config.json is missing")
        config = TrainConfig.from_json(read_text(folder / "config.json"), "config.json")
        step, best, without_better = _read_metrics(folder / METRICS)
        running = _is_locked(folder / LOCK)
        if not running:
            step, without_better = _read_checkpoint(folder / "checkpoints", step, without_better)
    except (ValueError, OSError) as error:
        return RunState(folder, changed, "damaged", problem=str(error))
    done = step >= config.steps or 0 < config.patience <= without_better
    state = "running" if running else "done" if done else "stopped"
    return RunState(folder, changed, state, step, config.steps, best)


def _folders(folder: Path, levels: int) -> Iterator[Path]:
    """Yields the folder if it is a run, else the runs below it."""
    left = MOST_FOLDERS
    level = [folder]
    for _ in range(levels + 1):
        inner: list[Path] = []
        for path in level:
            if _is_run(path):
                yield path
                continue
            with suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    if left and entry.is_dir(follow_symlinks=False):
                        left -= 1
                        inner.append(Path(entry.path))
        level = inner


def _is_run(folder: Path) -> bool:
    """Whether the folder is a run, also one that has lost its config.json and has checkpoints. A saved model has a
    config.json, but none of the other files."""
    config, names = folder / "config.json", ("run.json", METRICS, LOCK)
    begun = _modified(config) is not None or (not os.path.lexists(config) and (folder / "checkpoints").is_dir())
    return begun and any(os.path.lexists(folder / name) for name in names)


def _read_metrics(path: Path) -> tuple[int, float | None, int]:
    """Returns the last step, the best validation, and the number of validations since the best."""
    step, best, without_better = 0, None, 0
    for row in iterate(path) if os.path.lexists(path) else ():
        step = max(step, row["step"])
        bits = row.get("valid_bits_per_byte")
        if bits is not None:
            without_better += 1
            if best is None or bits < best:
                best, without_better = float(bits), 0
    return step, best, without_better


def _read_checkpoint(checkpoints: Path, step: int, without_better: int) -> tuple[int, int]:
    """Corrects the values of `_read_metrics` by the newest checkpoint, from which a run goes on.

    Its step may be later than the last logged one. Validations are counted anew after an extension.
    """
    # A checkpoint without state.json is unfinished.
    names = (path.parent.name.removeprefix("step-") for path in checkpoints.glob("step-*/state.json"))
    steps = [int(name) for name in names if name.isascii() and name.isdigit() and len(name) < LONGEST_STEP]
    if not steps:
        return step, without_better
    state = read_json(checkpoints / f"step-{max(steps)}" / "state.json")
    return max(step, *steps), whole_number("state.json", "without_better", state.get("without_better"), 0)


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock: a run in progress."""
    if not os.path.lexists(path):
        return False
    handle = open_inside(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # The file system has no locks.
        return False
    finally:
        os.close(handle)
    return False


def _modified(path: Path) -> float | None:
    """Time of the last write to a regular file; None for anything else."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime if stat.S_ISREG(about.st_mode) else None


def _row(run: RunState) -> tuple[str, str, str, str, str]:
    step = f"{run.step:,}/{run.steps:,}" if run.steps else ""
    best = "" if run.best is None else f"{run.best:.4f}" if abs(run.best) < WIDE else f"{run.best:.3g}"
    try:
        when = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        when = ""
    return printable(str(run.folder)), step, best, run.state, f"{when}  {printable(run.problem)[:SHOWN]}".rstrip()
