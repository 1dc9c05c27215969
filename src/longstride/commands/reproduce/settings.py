"""The flags of `longstride reproduce`. Imported without torch."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

ExperimentName = Literal["table2", "table3", "table4", "contest", "contest-25", "ablations"]
ScaleName = Literal["reduced", "full", "tiny"]


@dataclass(frozen=True)
class Reproduction:
    """An experiment of the paper. Example: longstride reproduce table2 --data enwik8 cifar10 --out table2"""

    data: tuple[Path, ...] = ()
    """Prepared stores or sources, one of text and one of images; each row takes the one of its kind, and rows without data
    are left out. With --scale tiny the bundled text and images, if none are given."""
    out: Path | None = None
    """Folder for the runs, and for the results in EXPERIMENT.json and EXPERIMENT.png. The same command goes on where it
    stopped: rows that are done are skipped, and a run that was stopped is resumed."""
    rows: tuple[str, ...] = ()
    """Rows to run; left out, all. An unknown name lists them. Rows that other calls have run stay in the results."""
    scale: ScaleName = "reduced"
    """reduced: minutes on one GPU, with Muon and without dropout; full: the paper's settings, days; tiny: networks of a few
    thousand weights and a few steps, to see it work on a CPU."""
    steps: int | None = None
    """Steps of each row, instead of those of --scale."""
    seconds: float | None = None
    """Train each row for this long instead: its number of steps follows from a timed probe. Compilation, validation and
    checkpoints do not count. 420 in contest, 1500 in contest-25."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; each row is run once for each, and tables have their mean and standard deviation."""
    split: str = "valid"
    """The split that trained networks are scored on: valid or test."""
    most_bytes: int | None = None
    """Score only this many bytes of the split, from the first on."""
    run: Path | None = None
    """In table3: a run or a saved model to score, instead of training one."""
    device: str = "auto"
    """Auto is the GPU if there is one. On a GPU steps are captured as CUDA graphs."""
    read: Path | None = None
    """Show the results in this file, of an earlier call, instead of training."""
    picture: Path | None = None
    """File for the picture, a .png or .svg; left out, EXPERIMENT.png in --out."""
    force: bool = False
    """Replace a picture that exists."""


def command_of(experiment: str, settings: Reproduction) -> str:
    """The command line that has these settings."""
    words = ["longstride", "reproduce", experiment]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", *map(str, _words(value))]
    return shlex.join(words)


def _words(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return []
    return list(value) if isinstance(value, tuple) else [value]
