"""Processes that are killed at any moment, while they save too: the run goes on as if nothing had been."""

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from longstride.training import train
from longstride.training.metrics import read_metrics
from tests.training.ranks import KILLED, start
from tests.training.small import store
from tests.training.worker import plan

PLAN = {
    "steps": 12, "save_every": 2, "log_every": 3, "validate_every": 4, "ema": 0.9,
    "model": {"dropout": 0.2, "layers": 1},
}  # fmt: skip
ALL = (
    "longstride.training.trainer.Trainer.take_step",
    "longstride.training.checkpoint_files.Writer.write_data",
)
"""What a process of any rank may die of."""
FIRST = (
    *ALL,
    "hashlib.file_digest",
    "longstride.training.checkpoint.save_file",
    "longstride.training.checkpoint.write_manifest",
    "longstride.training.run.Run.log",
    "longstride.training.trainer.Trainer.validate",
    "os.fsync",
    "os.replace",
    "os.unlink",
    "shutil.rmtree",
)
"""And one of the first."""
WHEN = ("before", "after", "half")
"""Half: after it, and only half of the file that it wrote is there."""
MOST = 6
"""The last call that may be deadly."""
TIMES = ("bytes_per_second", "seconds_per_step", "seconds_left", "loader_share")


def mortal(folder, deaths):
    """Begins the run or goes on with it. `deaths`: of this rank, the function, which call of it is the last, and when."""
    made = plan(folder, **PLAN)
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") in deaths:
            name, number, when = deaths[os.environ.get("RANK", "0")]
            stack.enter_context(patched(name, number, when))
        return train(made, (folder / "run/run/config.json").exists()).step


def patched(name, number, when):
    patcher = patch(name)
    function, calls = patcher.get_original()[0], []

    def fatal(*given, **named):
        calls.append(None)
        last = len(calls) == number
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*given, **named)
        if last and when == "half" and name.endswith("save_file"):
            os.truncate(given[1], given[1].stat().st_size // 2)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    return patch(name, fatal)


def left(folder):
    """All that a run leaves but for times: its curve, its best weights and its last checkpoint."""
    run = folder / "run/run"
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(run)]
    last = run / f"checkpoints/step-{PLAN['steps']}"
    paths = [run / "model.safetensors", *sorted(path for path in last.rglob("*") if path.is_file())]
    files = {path.relative_to(run): path.read_bytes() for path in paths if path.name != "manifest.json"}
    # Each run has an id of its own.
    numbers = json.loads(files.pop(Path(f"checkpoints/{last.name}/state.json")))
    assert numbers.pop("run") == json.loads((run / "run.json").read_text())["id"]
    assert not list(run.glob("metrics-to-step-*"))
    return rows, files, numbers


def killed(folder, ranks, wanted, seed):
    """Runs that are killed and go on until they are through, with so many deaths in all; their folders."""
    random, deaths, through = Random(seed), 0, []
    while True:
        run = folder / str(len(through))
        if not run.exists():
            store(run / "data")
        dies = {}
        if deaths < wanted:
            rank = deaths % ranks
            dies = {str(rank): (random.choice(ALL if rank else FIRST), random.randint(1, MOST), random.choice(WHEN))}
        if KILLED in {done.code for done in start(mortal, run, dies, ranks=ranks, may_die=True)}:
            deaths += 1
            continue
        through.append(run)
        if deaths == wanted:
            return through


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (1, 4),
        (2, 2),
        pytest.param(1, 20, marks=pytest.mark.slow),
        pytest.param(2, 20, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_goes_on_to_the_same_bits(ranks, wanted, tmp_path):
    store(tmp_path / "whole/data")
    start(mortal, tmp_path / "whole", {}, ranks=ranks)
    whole = left(tmp_path / "whole")
    assert [row["step"] for row in whole[0]] == [3, 4, 6, 8, 9, 12]
    for run in killed(tmp_path / "killed", ranks, wanted, seed=wanted):
        assert left(run) == whole


@pytest.mark.parametrize("death", [(1, "before"), (1, "after"), (2, "before")], ids=str)
def test_a_run_that_is_killed_as_it_begins_can_begin(death, tmp_path):
    store(tmp_path / "data")
    assert start(mortal, tmp_path, {"0": ("os.replace", *death)}, ranks=1, may_die=True)[0].code == KILLED
    assert start(mortal, tmp_path, {}, ranks=1)[0].found == PLAN["steps"]
