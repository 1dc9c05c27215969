"""Which runs go on, which begin anew, and which are refused: results are never lost."""

import io
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from longstride.training import loop, train, trainer
from longstride.training.manifest import write_manifest
from longstride.training.metrics import read_metrics
from longstride.training.ranks import Ranks
from longstride.training.run import Run
from longstride.training.trainer import Trainer
from tests.training.saved import names
from tests.training.small import config, same, weights

MODES = (True, "auto")


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """They take longer than the steps."""
    monkeypatch.setattr(Trainer, "finish", lambda *_: None)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def steps(run):
    return [row["step"] for row in read_metrics(run)]


def fails_at(monkeypatch, step):
    """Every run stops before that step is taken."""
    take_step = Trainer.take_step

    def fails(self, tokens):
        if self.step == step - 1:
            raise OSError("power cut")
        return take_step(self, tokens)

    monkeypatch.setattr(Trainer, "take_step", fails)


def cut(made, monkeypatch, step):
    """A run whose process is lost at that step."""
    with monkeypatch.context() as patch:
        fails_at(patch, step)
        with pytest.raises(OSError, match="power cut"):
            train(made)


def said(made, resume):
    file = io.StringIO()
    ended = train(made, resume, console=Console(file=file))
    return ended, file.getvalue().splitlines()


def test_a_finished_run_without_its_checkpoints_is_left_as_it_is(tmp_path):
    made, run = config(tmp_path), tmp_path / "run"
    train(made)
    shutil.rmtree(run / "checkpoints")
    before = content(run)
    for resume in MODES:
        with pytest.raises(
            ValueError, match=r"has results, model.safetensors, and no checkpoint to go on from; bring .*back"
        ):
            train(made, resume)
    assert content(run) == before


def test_auto_begins_a_run_and_goes_on_with_it(tmp_path):
    whole, parts = (config(tmp_path / name) for name in ("whole", "parts"))
    assert train(whole).step == 12
    for until in (4, 9, None, None):  # The last time it is done already.
        ended = train(parts, "auto", until)
        assert ended.step == (until or 12)
    assert ended.done
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "parts/run"))
    assert steps(tmp_path / "whole/run") == steps(tmp_path / "parts/run")


def test_auto_begins_no_run_among_other_files(tmp_path):
    made = config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="is not an empty folder; give another --out"):
        train(made, "auto")


def test_a_run_that_logged_and_never_saved_begins_anew_with_auto_only(tmp_path, monkeypatch):
    made, run = config(tmp_path, log_every=1, validate_every=12, save_every=12), tmp_path / "run"
    cut(made, monkeypatch, 4)
    assert names(run) == [".lock", "config.json", "data.json", "launch.txt", "metrics.jsonl", "run.json"]
    before = content(run)
    with pytest.raises(
        ValueError, match=r"has results, metrics up to step 3, and no checkpoint .* --resume auto begins it anew"
    ):
        train(made, resume=True)
    assert content(run) == before
    # It is lost once more before it has caught up: the longer log stays.
    with monkeypatch.context() as patch:
        fails_at(patch, 3)
        with pytest.raises(OSError, match="power cut"):
            train(made, "auto")
    assert (run / "metrics-to-step-3.jsonl").read_bytes() == before[run / "metrics.jsonl"]
    assert steps(run) == [1, 2]
    ended, lines = said(made, "auto")
    assert ended.step == 12
    kept = "metrics-to-step-3.jsonl until these steps are done once more"
    assert lines[0] == f"{run} has no checkpoint, and begins anew; its metrics so far are kept as {kept}"
    assert steps(run) == list(range(1, 13))
    assert not (run / "metrics-to-step-3.jsonl").exists()


@pytest.mark.parametrize("resume", MODES)
def test_a_run_that_has_nothing_yet_begins_anew(resume, tmp_path, monkeypatch):
    made, run = config(tmp_path), tmp_path / "run"
    cut(made, monkeypatch, 2)
    ended, lines = said(made, resume)
    assert ended.step == 12
    assert lines[0] == f"{run} has no checkpoint, and begins anew"


def test_processes_that_torchrun_starts_anew_do_as_auto(tmp_path, monkeypatch):
    """With the run that this launch has begun, whatever was asked for."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    made, run = config(tmp_path, log_every=1, validate_every=12, save_every=12), tmp_path / "run"
    cut(made, monkeypatch, 4)

    class Joined:
        def __init__(self, device): ...

        def __enter__(self):
            return Ranks(restarted=True)

        def __exit__(self, *given): ...

    monkeypatch.setattr(loop, "join_process_group", Joined)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    with pytest.raises(ValueError, match="already holds a run"):
        train(made)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert train(made).step == 12
    assert steps(run) == list(range(1, 13))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="has results"):
        train(made)


@pytest.mark.parametrize("resume", [None, "yes", 2], ids=str)
def test_other_ways_to_resume_are_refused(resume, tmp_path):
    with pytest.raises(ValueError, match=r"^train: resume must be True, False or 'auto', got "):
        train(config(tmp_path), resume)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_weights_come_after_a_checkpoint(ema, tmp_path, monkeypatch):
    """Whenever a process is lost: who has weights has a checkpoint, and it is the same run."""
    how = {"validate_every": 2, "save_every": 12, "ema": ema}
    train(config(tmp_path / "whole", **how), until=2)
    made, run = config(tmp_path / "cut", **how), tmp_path / "cut/run"
    with monkeypatch.context() as patch:
        patch.setattr("longstride.training.run.save_weights", power_cut)
        with pytest.raises(OSError, match="power cut"):
            train(made)
    assert "model.safetensors" not in names(run)
    assert names(run / "checkpoints") == ["step-2"]
    assert steps(run) == [2]
    train(made, resume=True, until=3)
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole/run/model.safetensors").read_bytes()


@pytest.mark.parametrize("content", [b"", b"nonsense", None], ids=["empty", "nonsense", "missing"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_weights_of_the_last_step_are_written_again(ema, content, tmp_path):
    made = config(tmp_path, ema=ema)
    assert train(made).best_step == 12
    path = tmp_path / "run/model.safetensors"
    before = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    assert train(made, resume=True).step == 12
    assert path.read_bytes() == before


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_best_weights_of_an_earlier_step_are_missed(ema, tmp_path, monkeypatch):
    bits = iter([3.0, 4.0, 5.0])
    monkeypatch.setattr(trainer, "validate", lambda *given: next(bits))
    made, run = config(tmp_path, validate_every=4, save_every=4, ema=ema), tmp_path / "run"
    assert train(made).best_step == 4
    path, copy = run / "model.safetensors", run / "checkpoints/step-4/model.safetensors"
    path.write_bytes(b"")
    before = content(run)
    fix = "bring it back from a copy, or give another --out" if ema else f"copy {copy} there"
    for resume in MODES:
        with pytest.raises(ValueError, match=rf"^train: {path}, the best weights of the run, cannot be read: .*; {fix}"):
            train(made, resume)
    assert content(run) == before
    if not ema:
        shutil.copy(copy, path)
        assert train(made, resume=True).step == 12


def power_cut(*given):
    raise OSError("power cut")


def test_weights_wait_for_a_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    """Begun at step 1, it may not be whole at step 2."""
    order = []
    finish, keep = trainer.Checkpoints.wait, Run.keep_best
    monkeypatch.setattr(trainer.Checkpoints, "wait", lambda self: (finish(self), order.append("whole"))[0])
    monkeypatch.setattr(Run, "keep_best", lambda self, *given: (order.append("weights"), keep(self, *given))[1])
    train(config(tmp_path, save_every=1, validate_every=2), until=2)
    assert order.index("weights") > 1
    assert order[order.index("weights") - 1] == "whole"


def test_later_weights_and_metrics_are_not_replaced_by_those_of_fewer_steps(tmp_path):
    """When the last checkpoints are gone, and steps are done once more."""
    made, run = config(tmp_path, validate_every=2, save_every=5, keep=9, log_every=1), tmp_path / "run"
    ended = train(made)
    assert ended.best_step == 12
    assert names(run / "checkpoints") == ["step-10", "step-12", "step-2", "step-5"]
    best, lines = (run / "model.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()
    for name in ("step-10", "step-12"):
        shutil.rmtree(run / "checkpoints" / name)
    again = train(made, resume=True, until=8)
    assert (again.best_step, steps(run)) == (8, list(range(1, 9)))
    assert (run / "model.safetensors").read_bytes() == best
    assert (run / "metrics-to-step-12.jsonl").read_bytes() == lines
    train(made, resume=True)
    assert (run / "model.safetensors").read_bytes() == best
    assert not (run / "metrics-to-step-12.jsonl").exists()


def test_better_weights_of_fewer_steps_replace_those_that_are_there(tmp_path):
    """As they may be on another machine; equal ones do not."""
    run, one, two = Run(tmp_path), {"x": weight(1)}, {"x": weight(2)}
    run.keep_best(one, 10, 3.0)
    before = (tmp_path / "model.safetensors").read_bytes()
    run.keep_best(two, 9, 3.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    run.keep_best(two, 9, 2.9)
    after = (tmp_path / "model.safetensors").read_bytes()
    assert after != before
    run.keep_best(one, 12, 3.5)  # The best of what this run has done.
    assert (tmp_path / "model.safetensors").read_bytes() not in (before, after)


@pytest.mark.parametrize("text", [b"", b"nonsense", b"\xff" * 100], ids=repr)
def test_weights_that_say_nothing_are_replaced(text, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(text)
    Run(tmp_path).keep_best({"x": weight(1)}, 1, 3.0)
    assert (tmp_path / "model.safetensors").stat().st_size > 100


def weight(number):
    import torch

    return torch.full((3,), float(number))


def test_a_checkpoint_knows_its_run(tmp_path):
    mine, other = config(tmp_path / "mine", steps=6), config(tmp_path / "other", steps=6, seed=1)
    for made in (mine, other):
        train(made, until=2)
    ids = [json.loads((tmp_path / name / "run/run.json").read_text())["id"] for name in ("mine", "other")]
    assert ids[0] != ids[1]
    train(other, resume=True, until=4)
    shutil.copytree(tmp_path / "other/run/checkpoints/step-4", tmp_path / "mine/run/checkpoints/step-4")
    before = content(tmp_path / "mine/run")
    with pytest.raises(
        ValueError, match=f"step-4 is of the run '{ids[1]}', and this run is '{ids[0]}'; remove that checkpoint"
    ):
        train(mine, resume=True)
    assert content(tmp_path / "mine/run") == before
    shutil.rmtree(tmp_path / "mine/run/checkpoints/step-4")
    assert train(mine, resume=True).step == 6


def test_a_run_that_was_copied_or_renamed_goes_on(tmp_path):
    made, run = config(tmp_path, steps=6), tmp_path / "run"
    train(made, until=2)
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "renamed")
    for name in ("copy", "renamed"):
        assert train(replace(made, out=str(tmp_path / name)), resume=True).step == 6


def without_id(folder):
    path = folder / "state.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "run"}))
    write_manifest(folder)


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """It has no id, and gets none."""
    made, run = config(tmp_path, steps=6), tmp_path / "run"
    train(made, until=2)
    without_id(run / "checkpoints/step-2")
    with pytest.raises(ValueError, match="step-2 is of a run without an id, and this run is '"):
        train(made, resume=True)
    (run / "run.json").unlink()
    assert train(made, resume=True, until=4).step == 4
    assert train(made, resume=True).step == 6
    assert not (run / "run.json").exists()


def test_a_run_that_lost_its_id_is_not_taken_for_an_old_one(tmp_path):
    made, run = config(tmp_path, steps=6), tmp_path / "run"
    train(made, until=2)
    (run / "run.json").rename(run / "kept.json")
    with pytest.raises(ValueError, match=r"step-2 is of the run '.*', and this run has none \(run.json is missing\)"):
        train(made, resume=True)
    (run / "kept.json").rename(run / "run.json")
    assert train(made, resume=True).step == 6


@pytest.mark.parametrize("split", ["train", "valid"])
def test_data_that_changed_is_noticed(split, tmp_path):
    """Though it has the same size, and its time is set back."""
    made = config(tmp_path, steps=6)
    train(made, until=2)
    path = tmp_path / "data" / f"{split}.bin"
    times = path.stat()
    path.write_bytes(np.fromfile(path, np.uint8)[::-1].tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = content(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{split}.bin has SHA-256 .* Prepare the data again"):
        train(made, resume=True)
    assert content(tmp_path / "run") == before
    with pytest.raises(ValueError, match=f"{split}.bin has SHA-256"):
        train(replace(made, out=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
