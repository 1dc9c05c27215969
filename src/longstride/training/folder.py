"""Whether a folder is free for a new run."""

import os
import shlex
from pathlib import Path

from longstride.common.atomic import is_temporary
from longstride.common.files import check_run_folder
from longstride.model.saved_config import is_run, read_content
from longstride.training.lock import NAME as LOCK

LAUNCH, RUN = "launch.txt", "run.json"
LEFTOVERS = (LOCK, LAUNCH, RUN, "data.json")
"""Files that may remain of a run that was killed at its start."""


def check_free(folder: Path) -> None:
    """ValueError if the folder holds a run or anything else, or if its weights could not be read again."""
    try:
        os.fsencode(folder).decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"train: out = {str(folder)!r} is no UTF-8, and safetensors reads no such path; give another --out"
        ) from None
    check_run_folder("train", folder)
    _check_config(folder)
    if (folder / "config.json").exists():
        raise ValueError(f"train: {folder} already holds a run; add --resume to go on with it, or give another --out")
    if folder.exists() and (not folder.is_dir() or any(not _is_leftover(path.name) for path in folder.iterdir())):
        raise ValueError(f"train: {folder} is not an empty folder; give another --out")


def check_holds_run(folder: Path) -> None:
    """ValueError if the folder holds no run to resume."""
    check_run_folder("train", folder)
    _check_config(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"train: {folder} holds no run to resume; leave --resume out to begin one")


def _check_config(folder: Path) -> None:
    """ValueError if the config.json in the folder is not that of a run, or if a run has lost it."""
    path = folder / "config.json"
    if path.exists() and not is_run(read_content(path)):
        raise ValueError(
            f"train: {folder} is a saved model and no run; give another --out, and --init-from {shlex.quote(str(folder))} "
            "to begin from its weights"
        )
    if not path.exists() and (folder / "checkpoints").is_dir():
        raise ValueError(
            f"train: {path} is missing, but not its checkpoints; bring it back from a copy, or give another --out for a new "
            "run"
        )


def _is_leftover(name: str) -> bool:
    return name in LEFTOVERS or is_temporary(name)
