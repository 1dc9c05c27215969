"""What fails on one process fails on all: with one message and one code, and the last checkpoint is as it was."""

import socket
from pathlib import Path

import pytest

from longstride.training.config import PARALLEL
from longstride.training.lock import Lock
from longstride.training.ranks import REPORTED, Ranks
from tests.training.ranks import start
from tests.training.saved import names
from tests.training.small import store
from tests.training.worker import commanded, disagreed, failing, limited, stopped_twice, trained

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path):
    store(tmp_path / "data")
    return tmp_path


def begun(folder, **changes):
    """A run with a checkpoint; the words that go on with it."""
    plans = [{"validate_every": 4, "save_every": 4, **changes}]
    assert trained(folder, plans, until=2)[0][0] == 2
    return plans, ["train", "text-small", "--out", str(folder / "run/run"), "--resume"]


def goes_on(folder, plans):
    """From the only checkpoint, which is whole."""
    assert "step-2" in names(folder / "run/run/checkpoints")
    assert trained(folder, plans, resume=True)[0][0] == 20


def test_all_raise_what_the_first_has_that_fails():
    """As the same kind; those that come after it need not show it. Which has it raises what it had."""
    full, odd, far = "[Errno 28] No space left on device", "not finite: \N{SNOWMAN}", f"process {{}}, on {HOST}: "
    found = [done.found for done in start(disagreed, ranks=3)]
    for rank, (first, second, third, fourth, fifth, last) in enumerate(found):
        noted = rank > 0
        assert first == ["ValueError", "bad data", noted]
        assert second == ["OSError", full, noted]
        assert third == (["RuntimeError", "KeyError('x')", noted] if rank else ["KeyError", "'x'", noted])
        assert fourth == ["ValueError", "bad data" if rank == 1 else far.format(1) + "bad data", noted]
        assert fifth == ["FloatingPointError", odd if rank == 2 else far.format(2) + odd, noted]
        assert last == ["none", f"done by {rank} of 3", False]


def test_alone_an_error_is_left_as_it_is():
    def fails():
        raise LookupError("mine")

    for way in (Ranks().run_on_all, Ranks().run_on_first, Ranks().run_first_per_machine):
        with pytest.raises(LookupError, match="mine") as caught:
            way(fails)
        assert REPORTED not in getattr(caught.value, "__notes__", ())


FULL = OSError(28, "No space left on device")
SAYS = "train: step {}: [Errno 28] No space left on device; step-2 is whole, and --resume goes on from it"
PLACES = {
    "the folder": ("run.Run.begin", [0], FULL, "[Errno 28] No space left on device"),
    "what is set aside": ("checkpoint.Checkpoints.set_aside", [0], FULL, "[Errno 28]"),
    "old metrics": ("run.Run.prepare_resume", [0], FULL, "[Errno 28]"),
    "metrics": ("run.Run.log", [0], FULL, SAYS.format(3)),
    "best weights": ("run.save_weights", [0], FULL, SAYS.format(4)),
    "damaged checkpoints": ("checkpoint.Checkpoints.newest", [0], ValueError("train: none is good"), "train: none is good"),
    "data of another machine": (
        "preflight.open_data",
        [1],
        ValueError("there is none"),
        f"process 1, on {HOST}: there is none",
    ),
    "a checkpoint on another machine": ("checkpoint.Reader", [1], FULL, f"process 1, on {HOST}: "),
    "a loss": ("trainer.Trainer.take_step", [0, 1], FloatingPointError("train: not finite"), "train: not finite"),
}


@pytest.mark.parametrize(("place", "ranks", "error", "says"), PLACES.values(), ids=PLACES)
def test_what_fails_ends_all_with_one_message(place, ranks, error, says, folder):
    plans, words = begun(folder)
    first, second = start(failing, words, f"longstride.training.{place}", ranks, error, code=2)
    assert first.err.splitlines()[-1].startswith(f"longstride: {says}")
    assert "Traceback" not in first.err
    assert second.err == ""
    goes_on(folder, plans)


def test_a_folder_that_another_run_has_is_refused_by_all(folder):
    """When a run is resumed, and when it begins."""
    plans, words = begun(folder)
    held = Lock(folder / "run/run"), Lock(folder / "new")
    new = ["train", "text-small", "--data", str(folder / "data"), "--out", str(folder / "new"), "--device", "cpu"]
    for name, given in (("run/run", words), ("new", new)):
        first, second = start(commanded, given, code=2)
        assert f"{folder / name} is in use by process " in first.err
        assert (first.err.count("\n"), second.err) == (1, "")
    assert names(folder / "new") == [".lock"]
    for one in held:
        one.release()
    goes_on(folder, plans)


@pytest.mark.parametrize(("how", "ranks"), [("ddp", [0, 1]), ("fsdp", [0]), ("fsdp", [1])], ids=str)
def test_a_full_disk_ends_all_with_one_message(how, ranks, folder):
    plans, words = begun(folder, parallel=how, validate_every=20)
    weights = folder / "run/run/checkpoints/step-2/model.safetensors"
    first, second = start(limited, words, weights.stat().st_size // 2, ranks, code=2)
    said = first.err.splitlines()
    assert said[-1].startswith(f"longstride: train: {weights.parents[1] / 'step-4'} could not be written: ")
    assert "File too large" in said[-1]
    assert said[-1].endswith("; step-2 is whole, and --resume goes on from it")
    assert "Traceback" not in first.err
    assert second.err == ""
    assert names(weights.parents[1]) == ["step-2"]
    goes_on(folder, plans)


@pytest.mark.parametrize("ranks", [[0, 1], [0], [1]], ids=str)
@pytest.mark.parametrize("how", PARALLEL)
def test_a_second_signal_ends_all_at_once(how, ranks, folder):
    """Though only some get it: those that lose the others, and know that somebody wants to stop, end as they do."""
    plans, words = begun(folder, parallel=how)
    first, second = start(stopped_twice, words, ranks, code=130)
    assert first.err.splitlines()[-1] == "longstride: interrupted"
    assert "Traceback" not in first.err
    assert second.err == ""
    assert [path.parent.name for path in Path(folder / "run/run/checkpoints").glob("*/manifest.json")] == ["step-2"]
    goes_on(folder, plans)
