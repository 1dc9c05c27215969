import json
from concurrent.futures import wait
from dataclasses import replace
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from longstride.training import checkpoint, checkpoint_files
from longstride.training.manifest import write_manifest
from tests.training.saved import bits, equal, keeper, made, names, part, save, walk
from tests.training.small import MODEL

FULL = OSError(28, "No space left on device")


def silent(message):
    pytest.fail(f"said: {message}")


@pytest.mark.parametrize("walked", [0, 1])
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_round_trip_has_the_same_bits(name, walked, tmp_path):
    """Whether or not there is a state already, which is replaced."""
    saved = made(name, steps=3)
    folder = save(tmp_path, 3, given=saved, best=3, losses=[0.1], scaler={"scale": 3.0})
    assert names(folder) == ["manifest.json", "model.safetensors", "state", "state.json"]
    other = made(name, seed=1, steps=walked)
    found = keeper(tmp_path).load(3, *other)
    assert found == {"version": 2, "step": 3, "losses": [0.1], "scaler": {"scale": 3.0}}
    assert all(one.state for one in other[1])
    assert equal(bits(*saved), bits(*other))
    for each in (saved, other):
        torch.manual_seed(2)
        walk(*each, 2)
    assert equal(bits(*saved), bits(*other))


def test_what_is_saved_is_the_state_at_that_time(tmp_path, monkeypatch):
    """Nothing is written before training has gone on: from weights to numbers, all was copied."""
    gone_on, prepare = Event(), checkpoint_files.Writer.prepare_local_plan

    def late(self, plan):
        assert gone_on.wait(60)
        return prepare(self, plan)

    monkeypatch.setattr(checkpoint_files.Writer, "prepare_local_plan", late)
    saved, losses = made("muon", steps=2), [0.5]
    before = bits(*saved)
    checkpoints = keeper(tmp_path)
    checkpoints.save(2, *saved, {"losses": losses})
    walk(*saved, 2)
    losses.append(0.25)
    assert names(tmp_path) == []
    gone_on.set()
    checkpoints.wait()
    assert not equal(before, bits(*saved))
    other = made("muon", seed=1)
    assert checkpoints.load(2, *other)["losses"] == [0.5]
    assert equal(before, bits(*other))


def test_a_second_save_copies_anew(tmp_path):
    """Into the same memory, when the first one no longer needs it."""
    saved, checkpoints, before = made(steps=1), keeper(tmp_path), {}
    for step in (1, 2, 3):
        before[step] = bits(*saved)
        checkpoints.save(step, *saved, {})
        walk(*saved, 1)
    checkpoints.wait()
    for step, found in before.items():
        other = made(seed=1)
        checkpoints.load(step, *other)
        assert equal(found, bits(*other))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizers_that_have_done_nothing_stay_so(name, tmp_path):
    """As when every step of a run in float16 was skipped. To ask PyTorch for their state would make one."""
    saved, other = made(name), made(name, seed=1)
    before = bits(*saved)
    save(tmp_path, 4, given=saved)
    assert not any(one.state for one in saved[1])
    keeper(tmp_path).load(4, *other)
    assert not any(one.state for one in other[1])
    assert equal(before, bits(*other))


def test_the_newest_are_kept_by_number(tmp_path):
    save(tmp_path, 8, 9, 10, keep=2)
    assert names(tmp_path) == ["step-10", "step-9"]
    assert keeper(tmp_path).newest(silent) == 10
    save(tmp_path, 100, keep=1)
    assert names(tmp_path) == ["step-100"]


def test_the_best_is_kept_too(tmp_path):
    save(tmp_path, 2, 4, 6, 8, keep=2, best=4)
    assert names(tmp_path) == ["step-4", "step-6", "step-8"]
    save(tmp_path, 10, keep=2, best=10)
    assert names(tmp_path) == ["step-10", "step-8"]


def test_the_same_step_again_replaces_it(tmp_path):
    """All of it: the first may have had a part more, of a process that is no longer there."""
    folder = save(tmp_path, 5, losses=[1])
    save_file({"x": torch.zeros(1)}, folder / "state/shard-00002-model-00001-of-00001.safetensors")
    save(tmp_path, 5, losses=[2])
    assert names(tmp_path) == ["step-5"]
    assert keeper(tmp_path).newest(silent) == 5
    assert keeper(tmp_path).load(5, *made())["losses"] == [2]


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    assert keeper(tmp_path / "missing").newest(silent) is None
    for name in ("step-x", "step-", "step--1", "step-²", "step-05", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-3").write_text("a file")
    before = names(tmp_path)
    assert keeper(tmp_path).newest(silent) is None
    keeper(tmp_path).set_aside(-1)
    save(tmp_path, 7, keep=1)
    assert names(tmp_path) == sorted([*before, "step-7"])


def test_an_unfinished_one_is_passed_over_and_removed_at_the_next_save(tmp_path):
    save(tmp_path, 5, 6)
    (tmp_path / "step-6/manifest.json").unlink()
    said = []
    assert keeper(tmp_path).newest(said.append) == 5
    assert said == [f"{tmp_path / 'step-6'} is unfinished: it has no manifest.json; the one before it is used"]
    save(tmp_path, 7)
    assert names(tmp_path) == ["step-5", "step-7"]


def test_only_unfinished_ones_are_none(tmp_path):
    """The run stopped in its first save, and begins anew."""
    (save(tmp_path, 5) / "manifest.json").unlink()
    said = []
    assert keeper(tmp_path).newest(said.append) is None
    assert said == [f"{tmp_path / 'step-5'} is unfinished: it has no manifest.json; there is none before it"]
    keeper(tmp_path).set_aside(-1)  # Perhaps it was whole, and lost its manifest.
    assert names(tmp_path) == ["unfinished-step-5"]


def test_damaged_ones_are_passed_over_and_set_aside(tmp_path):
    save(tmp_path, 5, 6, 7, 8)
    part(tmp_path / "step-6").write_bytes(b"")
    (tmp_path / "step-7/state.json").unlink()
    (tmp_path / "step-8/manifest.json").unlink()
    checkpoints, said = keeper(tmp_path), []
    assert checkpoints.newest(said.append) == 5
    assert [one.removeprefix(str(tmp_path)) for one in said] == [
        "/step-8 is unfinished: it has no manifest.json; the one before it is used",
        "/step-7 is damaged: state.json is missing; the one before it is used",
        f"/step-6 is damaged: state/{part(tmp_path / 'step-6').name} has other bytes than its manifest.json says; "
        "the one before it is used",
    ]
    (tmp_path / "damaged-step-7").mkdir()  # Of an earlier time.
    checkpoints.set_aside(5)
    assert names(tmp_path) == ["damaged-step-6", "damaged-step-7", "step-5"]
    assert names(tmp_path / "damaged-step-7") == ["manifest.json", "model.safetensors", "state"]
    assert checkpoints.newest(silent) == 5
    save(tmp_path, 6, 7, keep=1)
    assert names(tmp_path) == ["damaged-step-6", "damaged-step-7", "step-7"]


def test_if_all_are_damaged_nothing_begins_anew(tmp_path):
    save(tmp_path, 5, 6)
    for step in (5, 6):
        (tmp_path / f"step-{step}/model.safetensors").unlink()
    said = []
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be used: .*step-6 is damaged.*step-5 is damaged"):
        keeper(tmp_path).newest(said.append)
    assert len(said) == 2
    assert names(tmp_path) == ["step-5", "step-6"]


def without_average(**how):
    return *made(**how)[:2], {}


WIDE, DEEP, FLAT = replace(MODEL, width=64), replace(MODEL, layers=3), replace(MODEL, layers=1)
OTHERS = {
    "another optimizer": (made, {"steps": 1}, made, {"name": "muon"}),
    "the other way round": (made, {"name": "muon", "steps": 1}, made, {}),
    "another width": (made, {"steps": 1}, made, {"model": WIDE}),
    "more layers": (made, {"steps": 1}, made, {"model": DEEP}),
    "fewer layers": (made, {"steps": 1}, made, {"model": FLAT}),
    "another width, before a step": (without_average, {}, without_average, {"model": WIDE}),
    "more layers, before a step": (without_average, {}, without_average, {"model": DEEP}),
    "fewer layers, before a step": (without_average, {}, without_average, {"model": FLAT}),
    "no average saved": (without_average, {"steps": 1}, made, {}),
    "no average wanted": (made, {"steps": 1}, without_average, {}),
}


@pytest.mark.parametrize(("one", "saved", "two", "wanted"), OTHERS.values(), ids=OTHERS)
def test_what_is_of_another_run_is_refused(one, saved, two, wanted, tmp_path):
    save(tmp_path, 1, given=one(**saved))
    with pytest.raises(ValueError, match=r"step-1 is not of this run's model and optimizer: \w[^\n]+$"):
        keeper(tmp_path).load(1, *two(**wanted))


def test_a_weight_of_another_shape_is_refused(tmp_path):
    """Though it could be copied to all places."""
    folder = save(tmp_path, 1)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "norm.weight": torch.ones(1)}, folder / "model.safetensors")
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"optimizer: norm.weight has the shape \[1\], and \[32\] is wanted$"):
        keeper(tmp_path).load(1, *made())


def test_no_average(tmp_path):
    saved, other = without_average(steps=1), without_average(seed=1)
    save(tmp_path, 1, given=saved)
    keeper(tmp_path).load(1, *other)
    assert equal(bits(*saved), bits(*other))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 9}, "version 9 of checkpoints is not known, only 2 is"),
        ({"step": 3}, "its state.json is of step 3, not 1"),
    ],
    ids=str,
)
def test_another_version_or_step_is_refused(changes, says, tmp_path):
    """The step: somebody gave the folder another name."""
    folder = save(tmp_path, 1)
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**content, **changes}))
    write_manifest(folder)
    assert keeper(tmp_path).newest(silent) == 1
    with pytest.raises(ValueError, match=f"step-1 cannot be read: {says}"):
        keeper(tmp_path).load(1, *made())


def fails(*arguments, **more):
    raise FULL


def half(self, plan, planner):
    """Of the state there is a part when the disk is full."""
    (self.path / "shard").write_bytes(b"half")
    raise FULL


PLACES = {
    "the folder": ("longstride.training.checkpoint_files.Writer.prepare_local_plan", fails),
    "the state": ("longstride.training.checkpoint_files.Writer.write_data", half),
    "the weights": ("longstride.training.checkpoint.save_file", fails),
    "the manifest": ("longstride.training.checkpoint.write_manifest", fails),
    "the manifest's last moment": ("longstride.common.atomic.os.replace", fails),
}


@pytest.mark.parametrize(("place", "failure"), PLACES.values(), ids=PLACES)
def test_a_save_that_fails_leaves_the_last_one(place, failure, tmp_path, monkeypatch):
    """CheckpointException, which PyTorch makes of it, is no Exception: `wait` does not let it through."""
    saved = made(steps=1)
    before = bits(*saved)
    save(tmp_path, 5, given=saved, keep=1)
    checkpoints = keeper(tmp_path, keep=1)
    assert not checkpoints.failed
    with monkeypatch.context() as patched:
        patched.setattr(place, failure)
        checkpoints.save(6, *made(seed=1, steps=1), {})
        wait([checkpoints._pending_save])
        assert checkpoints.failed
        with pytest.raises(OSError, match="No space") as caught:
            checkpoints.wait()
    start, message = (
        f"train: {tmp_path / 'step-6'} could not be written: [Errno 28] No space left on device",
        str(caught.value),
    )
    assert message.startswith(start)
    assert message.endswith("; step-5 is whole, and --resume goes on from it")
    assert names(tmp_path) == ["step-5"]
    assert not checkpoints.failed
    checkpoints.wait()  # It was said once.
    other = made(seed=1)
    checkpoints.load(checkpoints.newest(silent), *other)
    assert equal(before, bits(*other))
    checkpoints.save(7, *other, {})  # There is room again.
    checkpoints.wait()
    assert names(tmp_path) == ["step-7"]


def test_the_next_save_says_that_the_last_one_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_manifest", fails)
    checkpoints = keeper(tmp_path)
    checkpoints.save(1, *made(), {})
    with pytest.raises(OSError, match=r"step-1 could not be written: .*; no checkpoint was written before"):
        checkpoints.save(2, *made(), {})
    assert names(tmp_path) == []


def test_a_reason_without_words_has_its_kind(tmp_path, monkeypatch):
    def out_of_memory(*arguments):
        raise MemoryError

    monkeypatch.setattr(checkpoint, "save_file", out_of_memory)
    checkpoints = keeper(tmp_path)
    checkpoints.save(1, *made(), {})
    with pytest.raises(OSError, match="could not be written: MemoryError; "):
        checkpoints.wait()


def test_a_place_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    checkpoints = keeper(tmp_path / "file")
    checkpoints.save(1, *made(), {})
    with pytest.raises(OSError, match=r"file/step-1 could not be written: .*Not a directory.*; no checkpoint was"):
        checkpoints.wait()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("cause", "seen"), [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError("odd"), ValueError)])
def test_ctrl_c_while_loading_is_no_fault_of_the_checkpoint(cause, seen, tmp_path, monkeypatch):
    """PyTorch makes the same error of both."""

    def stopped(*arguments, **more):
        raise CheckpointException("read", {0: (cause, None)})

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint_files, "load_sharded", stopped)
    with pytest.raises(seen) as caught:
        keeper(tmp_path).load(1, *made())
    assert ("is not of this run's model and optimizer: odd" in str(caught.value)) == (seen is ValueError)
