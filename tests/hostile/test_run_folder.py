"""A run's folder that somebody else has made: nothing outside it is written, removed or waited for, and what is forged in it
ends in one line and exit code 2."""

import json
import os
import shutil
import struct
import zlib

import pytest

from longstride.commands import main as cli
from longstride.training import train
from longstride.training.config import TrainConfig
from longstride.training.manifest import write_manifest
from longstride.training.trainer import Trainer
from tests.training.saved import keeper, made, names, save
from tests.training.small import config

DEEP = '{"a":' * 50_000
VERBS = ("train", "eval", "sample", "plot run", "doctor")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run that has paused, with all that a run can hold."""
    folder = tmp_path_factory.mktemp("template")
    planned = config(folder, steps=6, validate_every=2, save_every=2, log_every=1, model={"layers": 1})
    train(planned, until=4)
    run = folder / "run"
    for name in ("curve.png", "page.png", "sample-model.txt", "sample.txt", "eval-valid.json"):
        (run / name).write_text("{}")
    shutil.copytree(run / "checkpoints/step-2", run / "checkpoints/damaged-step-9")
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events").write_text("")
    return folder


@pytest.fixture
def run(template, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "finish", lambda *_: None)
    shutil.copytree(template / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def planned(template, run):
    """The run's settings, wherever its config.json has gone."""
    settings = json.loads((template / "run/config.json").read_text()) | {"out": str(run)}
    return TrainConfig.from_json(json.dumps(settings))


@pytest.fixture
def outside(tmp_path):
    """Somebody else's files, and what they should be in the end."""
    folder = tmp_path / "outside"
    (folder / "step-1").mkdir(parents=True)
    for name in ("file", "step-1/manifest.json", "step-1/model.safetensors"):
        (folder / name).write_text("mine")
    yield folder
    found = {path.relative_to(folder).as_posix(): path.is_file() and path.read_text() for path in folder.rglob("*")}
    assert found == {
        "file": "mine", "step-1": False, "step-1/manifest.json": "mine", "step-1/model.safetensors": "mine"
    }  # fmt: skip


def command(verb, run):
    """The words that work on a run."""
    return [*verb.split(), *(["text-small", "--out", str(run), "--resume"] if verb == "train" else [str(run)])]


def ends_in_one_line(capsys, words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("longstride: ")
    assert said.count("\n") == 1
    assert len(said) < 1500
    return said


def replaced(path, target):
    """`path` as a link to `target`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


FILES = (
    ".lock", "launch.txt", "config.json", "data.json", "run.json", "metrics.jsonl", "model.safetensors", "curve.png",
    "page.png", "sample-model.txt", "sample.txt", "eval-valid.json", ".model.1234.safetensors",
    ".model.1234-00000000.safetensors", "metrics-to-step-9.jsonl", "checkpoints/step-4/state.json",
    "checkpoints/step-4/manifest.json", "checkpoints/step-4/model.safetensors", "tensorboard/events",
)  # fmt: skip
FOLDERS = (
    "checkpoints", "checkpoints/step-4", "checkpoints/step-5", "checkpoints/step-4/state", "checkpoints/damaged-step-4",
    "checkpoints/unfinished-step-4", "tensorboard",
)  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_run_with_a_link_is_not_resumed(name, run, planned, outside):
    for target in (outside if name in FOLDERS else outside / "file", outside / "none"):
        replaced(run / name, target)
        before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
        with pytest.raises(
            ValueError, match=f"^train: {run / name} is a link; a run holds only files and folders of its own"
        ):
            train(planned, resume=True)
        assert {path: path.lstat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    "name", [".lock", "launch.txt", "data.json", "run.json", "config.json", ".config.12.json", "checkpoints"]
)
def test_no_run_begins_beside_a_link(name, run, planned, outside):
    shutil.rmtree(run)
    run.mkdir()
    for target in (outside / "file", outside / "none"):
        replaced(run / name, target)
        for resume in (False, "auto"):
            with pytest.raises(ValueError, match=f"{run / name} is a link"):
                train(planned, resume)


@pytest.mark.parametrize("verb", ["eval", "sample", "plot run"])
@pytest.mark.parametrize("name", ["eval-valid.json", "sample.txt", "page.png", "checkpoints"])
def test_nothing_is_written_into_a_run_with_a_link(verb, name, run, outside, capsys):
    replaced(run / name, outside if name == "checkpoints" else outside / "file")
    words = command(verb, run) + (["--count", "2"] if verb == "sample" else [])
    before = names(run)
    assert f"{run / name} is a link" in ends_in_one_line(capsys, words)
    assert names(run) == before


def test_the_run_itself_may_be_a_link(run, planned, tmp_path):
    run.rename(tmp_path / "scratch")
    run.symlink_to(tmp_path / "scratch")
    assert train(planned, resume=True).step == 6


def test_a_lock_that_is_a_hard_link_is_refused(run, planned, outside):
    (run / ".lock").unlink()
    (run / ".lock").hardlink_to(outside / "file")
    with pytest.raises(ValueError, match=r"\.lock is a hard link"):
        train(planned, resume=True)


def test_metrics_that_are_a_hard_link_become_a_file_of_their_own(run, planned, outside):
    """As in copies that share what does not change."""
    kept = outside.parent / "kept"
    kept.hardlink_to(run / "metrics.jsonl")
    before = kept.read_bytes()
    assert train(planned, resume=True).step == 6
    assert kept.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        ".lock", "launch.txt", "config.json", "data.json", "run.json", "metrics.jsonl", "model.safetensors",
        "checkpoints/step-4/manifest.json", "checkpoints/step-4/state.json", "checkpoints/step-4/state/part-9.safetensors",
    ],
)  # fmt: skip
def test_a_fifo_is_not_waited_for(name, run, planned, capsys):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"^train: {run / name} is a FIFO"):
        train(planned, resume=True)
    assert "FIFO" in ends_in_one_line(capsys, command("plot run", run))
    missing = {"config.json": "it has no config.json", "model.safetensors": "has no weights yet"}
    assert missing.get(name, "FIFO") in ends_in_one_line(capsys, command("eval", run))
    if name.startswith("checkpoints"):
        assert "is damaged" in ends_in_one_line(capsys, [*command("eval", run), "--checkpoint", "step-4"])


def test_checkpoints_that_are_links_are_neither_read_nor_removed(tmp_path, outside):
    """Whoever has put them there after the run was looked at."""
    folder = tmp_path / "checkpoints"
    save(folder, 2)
    for name in ("step-1", "damaged-step-5", "unfinished-step-6"):
        (folder / name).symlink_to(outside / "step-1")
    (folder / "step-7").symlink_to(folder / "step-2")
    checkpoints = keeper(folder, keep=1)
    assert checkpoints.newest(pytest.fail) == 2
    checkpoints.set_aside(2)
    checkpoints.save(3, *made(steps=1), {})
    checkpoints.wait()
    assert names(folder) == ["damaged-step-5", "step-1", "step-3", "step-7", "unfinished-step-6"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "nonsense",
        DEEP,
        '{"model": ' + "[" * 300 + "]" * 300 + "}",
        '{"model": {"layers": NaN}}',
        "x" * 2**25,
    ],
    ids=lambda text: f"{text[:12]} {len(text)}",
)
def test_forged_settings(verb, text, run, capsys):
    (run / "config.json").write_text(text)
    assert "config.json" in ends_in_one_line(capsys, command(verb, run))


@pytest.mark.parametrize("verb", VERBS)
def test_settings_that_are_no_text(verb, run, capsys):
    (run / "config.json").write_bytes(b"\xff\xfe\x00" * 99)
    assert "config.json" in ends_in_one_line(capsys, command(verb, run))


LINES = (
    "[]", "{}", "nonsense", '{"step": ' + "[" * 30_000, '{"step": "a"}', '{"step": 5, "bits_per_byte": [1]}',
    '{"step": 5, "bits_per_byte": 1e999}', '{"step": 5, "learning_rate": "fast"}', '{"a": "' + "x" * 2**17 + '"}',
)  # fmt: skip


@pytest.mark.parametrize("verb", ["train", "plot run"])
@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:30])
def test_forged_metrics(verb, line, run, planned, capsys):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    before = (run / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl is damaged: line 5" in ends_in_one_line(capsys, command(verb, run))
    assert (run / "metrics.jsonl").read_bytes() == before


def test_extreme_numbers_are_drawn_or_refused(run, capsys):
    rows = [{"step": 2**62, "bits_per_byte": 1e100, "valid_bits_per_byte": -1e100, "gradient_norm": 1e100}]
    rows.append({"step": 0, "bits_per_byte": 10**100, "learning_rate": 1e-300, "bytes_per_second": 1e100})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("sample-model.txt", "sample.txt"):
        (run / name).unlink()
    cli.main(["plot", "run", str(run)])
    assert capsys.readouterr().out == f"wrote {run / 'page.png'}\n"


STATES = {
    "best": ("low", [1], 10**400, True, {}),
    "best_step": (None, "2", 2.5, 0, -1, 5, 10**30),
    "without_better": (None, "1", -1, 1.5, 10**30, [], 5),
    "losses": (None, 3, "many", {"a": 1}, ["low"], [None], [[1.0]], [10**400], [1.0] * 5),
    "run": (None, 3, "", "0" * 32, ["a"], {"a": "b"}),
    "version": (None, "2", 3, 10**400),
    "step": (None, "4", 5, -1, 10**400),
}


@pytest.mark.parametrize("name", STATES)
def test_a_forged_state(name, run, planned, capsys):
    folder = run / "checkpoints/step-4"
    numbers = json.loads((folder / "state.json").read_text())
    for value in STATES[name]:
        (folder / "state.json").write_text(json.dumps(numbers | {name: value}))
        write_manifest(folder)
        assert "step-4" in ends_in_one_line(capsys, command("train", run))
    del numbers[name]
    (folder / "state.json").write_text(json.dumps(numbers))
    write_manifest(folder)
    assert "step-4" in ends_in_one_line(capsys, command("train", run))
    assert names(run / "checkpoints") == ["damaged-step-9", "step-2", "step-4"]


@pytest.mark.parametrize(
    "text", ["", "[]", DEEP, '{"best": NaN}', '{"best": 1e999}', "x" * 2**25], ids=lambda text: text[:12]
)
def test_a_state_that_is_none(text, run, capsys):
    folder = run / "checkpoints/step-4"
    (folder / "state.json").write_text(text)
    write_manifest(folder)
    assert "step-4 cannot be read: " in ends_in_one_line(capsys, command("train", run))
    assert "step-4 cannot be read: " in ends_in_one_line(capsys, [*command("eval", run), "--checkpoint", "step-4"])


def test_a_checkpoint_of_more_steps_than_the_run_has(run, planned, capsys):
    for step in (7, 10**17):
        folder = run / f"checkpoints/step-{step}"
        shutil.copytree(run / "checkpoints/step-4", folder)
        numbers = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(numbers | {"step": step}))
        write_manifest(folder)
        assert "step must be at most the run's 6 steps" in ends_in_one_line(capsys, command("train", run))
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"id": 5}', '{"id": "../../x"}', DEEP, "x" * 2**25], ids=lambda text: text[:12]
)
def test_a_forged_id(text, run, capsys):
    (run / "run.json").write_text(text)
    assert "run.json" in ends_in_one_line(capsys, command("train", run))
    assert "run.json" in ends_in_one_line(capsys, [*command("eval", run), "--checkpoint", "step-4"])


def test_another_runs_checkpoint_is_not_evaluated(run, capsys):
    (run / "run.json").write_text(json.dumps({"id": "0" * 32}))
    said = ends_in_one_line(capsys, [*command("eval", run), "--checkpoint", "step-4"])
    assert "step-4 is of the run '" in said
    assert f"and this run is '{'0' * 32}'" in said


@pytest.mark.parametrize(
    "text", ["", "[]", '{"splits": 3}', DEEP, '{"splits": {"train": NaN}}', "x" * 2**25], ids=lambda t: t[:25]
)
@pytest.mark.parametrize("verb", ["train", "eval", "plot run"])
def test_forged_data(text, verb, run, capsys):
    for name in ("sample-model.txt", "sample.txt", "eval-valid.json"):
        (run / name).unlink()
    (run / "data.json").write_text(text)
    assert "data.json is damaged" in ends_in_one_line(capsys, command(verb, run))


@pytest.mark.parametrize("text", ["[]", DEEP, '{"rows": [[]]}', "x" * 2**25], ids=lambda text: text[:12])
def test_forged_results_are_not_replaced(text, run, capsys):
    (run / "eval-valid.json").write_text(text)
    assert "exists and is no evaluation" in ends_in_one_line(capsys, command("eval", run))
    assert (run / "eval-valid.json").read_text() == text


def wave(samples, rate):
    """A sound of 16 bits whose header says so."""
    sizes = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVEfmt " + sizes + b"data" + struct.pack("<I", 2 * samples)
    return b"RIFF" + struct.pack("<I", len(body) + 2 * samples) + body


def picture(width, height):
    """The beginning of a PNG, which says how large it is."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


SAMPLES = {
    "sample-model.wav": (wave(10, 0), wave(2**30, 12_000), b"RIFF", b""),
    "sample-model.png": (picture(10_000, 10_000), picture(10**5, 10**5), picture(2**31 - 1, 2**31 - 1), picture(8, 8), b""),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_forged_samples(name, run, capsys):
    (run / "sample-model.txt").unlink()
    for content in SAMPLES[name]:
        (run / name).write_bytes(content)
        said = ends_in_one_line(capsys, command("plot run", run))
        assert f"{name} cannot be read: " in said
        assert "remove it, and the page is drawn without it" in said


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "model.safetensors", "launch.txt", "checkpoints/step-9"])
def test_a_folder_for_a_file_and_a_file_for_a_folder_are_refused(tmp_path, name):
    planned = config(tmp_path, steps=4, validate_every=4)
    train(planned, until=2)
    path = tmp_path / "run" / name
    path.unlink(missing_ok=True)
    if path.suffix or path.name == ".lock":
        path.mkdir()
    else:
        path.write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"is a (folder|file), and a run has a (file|folder) of that name"):
        train(planned, resume=True)
