import json
from dataclasses import replace
from pathlib import Path

import pytest

from longstride.data.store import Store
from longstride.training import TrainConfig, train
from longstride.training.run import CHANGEABLE, Run
from tests.training.small import MODEL, config


def of(folder, **changes):
    return TrainConfig(MODEL, data="data", out=str(folder), **changes)


STORE = Store(Path("data"), "text", (), None, {"train": 5, "valid": 2}, {"train": "a", "valid": "b"})


def begun(folder):
    run = Run.new(of(folder))
    run.begin(of(folder), STORE)
    return run


def test_a_new_run_writes_nothing_before_it_begins(tmp_path):
    run = Run.new(of(tmp_path / "a/b"))
    assert not (tmp_path / "a").exists()
    run.begin(of(tmp_path / "a/b"), STORE)
    assert {path.name for path in run.folder.iterdir()} == {".lock", "config.json", "data.json", "launch.txt", "run.json"}
    # The data is found again from any folder.
    wanted = replace(of(tmp_path / "a/b"), data=str(Path.cwd() / "data"))
    assert TrainConfig.from_json((run.folder / "config.json").read_text()) == wanted


def test_an_empty_folder_will_do(tmp_path):
    begun(tmp_path)


def test_a_name_that_is_no_text_is_refused(tmp_path):
    """safetensors could not read the weights there: the run could be neither resumed nor evaluated."""
    with pytest.raises(ValueError, match=r"out = '.*run\\udcff' is no UTF-8, .*; give another --out$"):
        Run.new(of(tmp_path / "run\udcff"))


@pytest.mark.parametrize("name", ["precious.txt", ".hidden"])
def test_a_folder_that_is_not_empty_is_refused(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder; give another --out"):
        Run.new(of(tmp_path))


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match="is a file; give the folder of a run"):
        Run.new(of(tmp_path / "run"))
    with pytest.raises(ValueError, match="is a file; give the folder of a run"):
        Run.resumed(of(tmp_path / "run"))


def test_a_run_is_not_begun_twice(tmp_path):
    begun(tmp_path)
    with pytest.raises(ValueError, match="already holds a run; add --resume to go on with it, or give another --out"):
        Run.new(of(tmp_path))


def test_a_saved_model_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text(MODEL.to_json())
    for begin in (Run.new, Run.resumed):
        with pytest.raises(
            ValueError, match=f"is a saved model and no run; give another --out, and --init-from {tmp_path} "
        ):
            begin(of(tmp_path))


@pytest.mark.parametrize("content", ["{}", '{"name": "a web page", "version": "1.0"}', '{"model": 3, "steps": 10}'])
def test_a_config_of_something_else_is_no_saved_model(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    for begin in (Run.new, Run.resumed):
        with pytest.raises(ValueError, match=r"config\.json describes no run and no saved model; give another folder"):
            begin(of(tmp_path))


def test_a_run_that_has_lost_its_settings(tmp_path):
    begun(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").unlink()
    for begin in (Run.new, Run.resumed):
        with pytest.raises(ValueError, match=r"config\.json is missing, but not its checkpoints; bring it back"):
            begin(of(tmp_path))


def test_without_a_folder():
    for begin in (Run.new, Run.resumed):
        with pytest.raises(ValueError, match="--out must be given"):
            begin(of(""))


OTHER = {
    "data": "elsewhere",
    "validate_every": 3,
    "save_every": 3,
    "keep": 3,
    "log_every": 3,
    "tensorboard": True,
    "device": "cpu",
    "patience": 3,
    "accumulate": 2,
    "parallel": "fsdp",
    "averaging": "float32",
    "compile": True,
    "capture": "off",
    "gpu_memory": "16GB",
}


def test_what_changes_no_step_may_change(tmp_path):
    begun(tmp_path)
    assert OTHER.keys() == CHANGEABLE - {"out"}
    for name, value in OTHER.items():
        assert Run.resumed(of(tmp_path, **{name: value} if name != "data" else {})).folder == tmp_path
    assert Run.resumed(replace(of(tmp_path), data="elsewhere")).folder == tmp_path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_from": "/elsewhere"}, "init_from was '' and is now '/elsewhere'"),
        ({"batch": 4}, "batch was 8 and is now 4"),
        ({"ema": 0.5}, "ema was 0.0 and is now 0.5"),
        ({"optimizer": replace(of("x").optimizer, beta1=0.5)}, "optimizer beta1 was 0.9 and is now 0.5"),
        ({"model": replace(MODEL, dropout=0.1)}, "model dropout was 0.2 and is now 0.1"),
    ],
    ids=str,
)
def test_what_changes_a_step_may_not(changes, says, tmp_path):
    begun(tmp_path)
    with pytest.raises(ValueError, match=f"train: {says}; a run is resumed with what it began with"):
        Run.resumed(replace(of(tmp_path), **changes))


def test_steps_may_become_more_not_fewer(tmp_path):
    begun(tmp_path)
    assert Run.resumed(of(tmp_path)).steps_before is None
    assert Run.resumed(of(tmp_path, steps=1001)).steps_before == 1000
    with pytest.raises(ValueError, match="train: steps was 1000 and is now 3; it can be more, not less"):
        Run.resumed(of(tmp_path, steps=3))


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model"')
    for begin in (Run.new, Run.resumed):
        with pytest.raises(
            ValueError, match=r"config\.json is not JSON.*; bring the file back from a copy, or give another"
        ):
            begin(of(tmp_path))


def test_a_validation_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch):
    from longstride.training import trainer

    found = iter([float("nan"), 3.0, 2.0])
    monkeypatch.setattr(trainer, "validate", lambda *_: next(found))
    ended = train(config(tmp_path, steps=3, validate_every=1))
    assert ended.best_step == 3
    assert (tmp_path / "run/model.safetensors").exists()
    assert json.loads((tmp_path / "run/checkpoints/step-3/state.json").read_text())["best_step"] == 3


def test_a_restart_goes_on_with_what_its_own_launch_began(tmp_path, monkeypatch):
    """And with no other run, which it would have refused at first."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert not Run.is_of_this_launch(of(tmp_path))
    begun(tmp_path).unlock()
    assert Run.is_of_this_launch(of(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert not Run.is_of_this_launch(of(tmp_path))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not Run.is_of_this_launch(of(tmp_path))


def test_launches_without_an_id_are_told_apart(tmp_path, monkeypatch):
    """By the process of torchrun, which is the parent of those that it starts anew, too."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    begun(tmp_path).unlock()
    assert Run.is_of_this_launch(of(tmp_path))
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert not Run.is_of_this_launch(of(tmp_path))
