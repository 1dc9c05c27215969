import json

import pytest

pytest.importorskip("tyro")

from longstride.commands.main import main
from longstride.commands.verbs import train as verb
from longstride.training import train_preset


@pytest.fixture
def started(monkeypatch):
    """The configs that would be trained."""
    found = []
    monkeypatch.setattr(verb, "_train", lambda preset, config, *_: found.append(config))
    return found


def test_a_toml_file_is_a_start(tmp_path, started):
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\nout = "elsewhere"\n[model]\nlayers = 2\n[optimizer]\nlearning_rate = 0.5\n')
    main(["train", "text-small", "--config", str(path), "--data", "x", "--out", "new", "--batch", "1e1"])
    main(["train", "text-small", f"--config={path}", "--steps", "9", "--model.layers", "3"])
    first, second = started
    preset = train_preset("text-small")
    assert (first.steps, first.model.layers, first.optimizer.learning_rate, first.batch) == (7, 2, 0.5, 10)
    assert (first.out, first.data) == ("new", "x")
    assert (first.model.width, first.optimizer.name) == (preset.model.width, "muon")
    assert (second.steps, second.model.layers, second.out) == (9, 3, "")


def test_a_runs_config_is_a_start_without_a_preset(tmp_path, started):
    path = tmp_path / "config.json"
    path.write_text(train_preset("enwik8", data="enwik8", out="old", seed=3).to_json())
    main(["train", "--config", str(path), "--out", "new"])
    assert started == [train_preset("enwik8", data="enwik8", out="new", seed=3)]


def test_a_run_whose_config_is_broken_is_no_start(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(tmp_path), "--out", "new"])
    assert end.value.code == 2
    assert "bring the file back from a copy, or give another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "steps = ", "is not TOML of settings: "),
        ("a.toml", f"steps = {'9' * 5000}", "is not TOML of settings: Exceeds the limit"),
        ("a.toml", f"steps = 0x{'f' * 5000}", "is not TOML of settings: Exceeds the limit"),
        ("a.toml", f"steps = {'[' * 5000}", "is not TOML of settings: maximum recursion depth"),
        ("a.toml", f"{'a.' * 50_000}b = 1", "has 100,005 bytes; at most 32,768 are read of such a file"),
        ("a.toml", "stesp = 3", "there is no field 'stesp'; did you mean 'steps'?"),
        ("a.toml", "steps = 2020-01-01", "steps must be a whole number"),
        ("a.toml", "model = 3", "model must be an object, got 3"),
        ("a.json", "{", "is not JSON: "),
        ("a.json", json.dumps({"steps": 0}), "steps must be at least 1, got 0"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["train", "text-small", "--config", str(path)])
    err = capsys.readouterr().err
    assert (end.value.code, err.count("\n")) == (2, 1)
    assert err.startswith(f"longstride: {path}")
    assert says in err
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "nowhere.toml")])
    assert "nowhere.toml' is no file; give a TOML file" in capsys.readouterr().err


def test_an_exponent_in_toml_is_a_whole_number_as_on_the_command_line(tmp_path, started):
    path = tmp_path / "run.toml"
    path.write_text("steps = 1e3\nsave_every = 2.5e2\n[optimizer]\nlearning_rate = 1e-3\n")
    main(["train", "text-small", "--config", str(path), "--data", "x", "--out", "new"])
    (config,) = started
    assert (config.steps, config.save_every, config.optimizer.learning_rate) == (1000, 250, 0.001)
    assert [type(value) for value in (config.steps, config.optimizer.learning_rate)] == [int, float]


def test_a_file_without_a_model_asks_for_a_preset(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("steps = 3\n")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", str(path), "--data", "x", "--out", "new"])
    assert "has no model; name a preset first: longstride train text-small" in capsys.readouterr().err


def test_a_recipe_replaces_preset_and_file_and_flags_replace_it(tmp_path, started):
    path = tmp_path / "run.toml"
    path.write_text("steps = 7\n[model]\nlayers = 2\nlast_bytes = 2\n[optimizer]\nlearning_rate = 0.5\n")
    main(["train", "enwik8", "--recipe", "modern", "--model.last-bytes", "4"])
    main(["train", "enwik8", "--config", str(path), "--recipe=modern", "--optimizer.flat", "0.5"])
    first, second = started
    assert first == train_preset("enwik8", "modern", model={"last_bytes": 4})
    assert second == train_preset("enwik8", "modern", steps=7, model={"layers": 2}, optimizer={"flat": 0.5})


def test_an_unknown_recipe(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "enwik8", "--recipe", "old"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "longstride: train: recipe must be one of paper, modern, got 'old'\n"
