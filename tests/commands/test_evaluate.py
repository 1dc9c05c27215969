"""`longstride eval`, from the command line to the table and the file."""

import io
import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import longstride
from longstride import bits_per_byte
from longstride.commands import main as cli
from longstride.commands.evaluate import show_score
from longstride.common.console import Progress
from longstride.data.store import open_store, write_store
from longstride.model import SparseTransformer
from longstride.model.card import Card, write_card
from longstride.training import train
from tests.training.ranks import start, torchrun
from tests.training.small import MODEL, TEXT, config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps, with a test split; made once, and copied for each test."""
    folder = tmp_path_factory.mktemp("evaluated")
    splits = {"train": TEXT[:20_000], "valid": TEXT[20_000:22_000], "test": TEXT[22_000:23_001]}
    write_store(folder / "data", "text", splits)
    train(config(folder, data=str(folder / "data"), steps=10, optimizer={"learning_rate": 0.01}))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run/config.json"
    path.write_text(path.read_text().replace(str(trained), str(tmp_path)))
    return tmp_path


def run(capsys, *words):
    """(exit code, standard output, standard error)"""
    code = 0
    try:
        cli.main(["eval", *map(str, words), "--device", "cpu"])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run(capsys, folder):
    code, out, err = run(capsys, folder / "run", "--min-context", 0, 32, 60)
    assert code == 0
    model, store = SparseTransformer.from_pretrained(folder / "run"), open_store(folder / "data")
    wanted = [bits_per_byte(model, store.split("valid"), min_context=least) for least in (0, 32, 60)]
    path = folder / "run/eval-valid.json"
    found = json.loads(path.read_text())
    assert [row["bits_per_byte"] for row in found["rows"]] == [row.bits_per_byte for row in wanted]
    assert [(row["min_context"], row["windows"], row["bytes"]) for row in found["rows"]] == [
        (0, 32, 2000),
        (32, 62, 2000),
        (60, 485, 2000),
    ]
    assert found["data"] == {
        "path": str(folder / "data"),
        "kind": "text",
        "split": "valid",
        "sha256": store.sha256["valid"],
    }
    assert found["model"]["context"] == 64
    assert found["evaluated"] == str(folder / "run")
    assert len(found["weights_sha256"]) == 64
    for row in found["rows"]:
        assert row["processes"] == 1
        assert row["machine"]["torch"] == torch.__version__
        assert row["machine"]["longstride"] == longstride.__version__
    for row in wanted:
        assert f"{row.bits_per_byte:.4f}" in out
    assert "2,000 of 2,000 bytes" in out
    assert f"wrote {path}\n" in out
    assert err.splitlines()[0].startswith("min context 0  2,000 of 2,000 bytes  ")
    assert err.count("bits/byte") == len(err.splitlines())


def test_another_split_checkpoint_part_and_place(capsys, folder):
    """None of them takes the place of another's file."""
    run(capsys, folder / "run")
    run(capsys, folder / "run", "--split", "test")
    run(capsys, folder / "run", "--checkpoint", "step-5")
    run(capsys, folder / "run", "--most-bytes", 300)
    code, out, _ = run(capsys, folder / "run", "--json", folder / "mine.json", "--precision", "bfloat16", "--batch", 2)
    assert code == 0
    assert f"wrote {folder / 'mine.json'}" in out
    names = ["eval-test", "eval-valid", "eval-valid-first-300", "eval-valid-step-5"]
    assert sorted(path.stem for path in (folder / "run").glob("eval-*")) == names
    found = {name: json.loads((folder / f"run/{name}.json").read_text()) for name in names}
    found["mine"] = json.loads((folder / "mine.json").read_text())
    assert len({one["rows"][0]["bits_per_byte"] for one in found.values()}) == len(found)
    assert [one["bytes"] for one in found.values()] == [1001, 2000, 300, 2000, 2000]
    assert found["eval-valid-step-5"]["evaluated"] == str(folder / "run/checkpoints/step-5")
    assert found["mine"]["model"]["precision"] == "bfloat16"
    wanted = SparseTransformer.from_pretrained(folder / "run/checkpoints/step-5")
    data = open_store(folder / "data").split("valid")
    assert found["eval-valid-step-5"]["rows"][0]["bits_per_byte"] == bits_per_byte(wanted, data).bits_per_byte


def test_data_at_home(capsys, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    path = folder / "run/config.json"
    path.write_text(path.read_text().replace(str(folder / "data"), "~/data"))
    assert run(capsys, folder / "run")[0] == 0


def test_a_saved_model_and_a_source(capsys, folder, monkeypatch):
    """Which is prepared. No file is written that was not asked for."""
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(folder / "cache"))
    SparseTransformer.from_pretrained(folder / "run").save_pretrained(folder / "model")
    (folder / "other.txt").write_bytes(TEXT[:9000].tobytes())
    code, out, _ = run(capsys, folder / "model", "--data", folder / "other.txt", "--split", "test")
    assert code == 0
    assert "wrote" not in out
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["config.json", "model.safetensors"]
    code, _, _ = run(capsys, folder / "model", "--data", folder / "other.txt", "--json", folder / "a.json")
    assert code == 0
    assert json.loads((folder / "a.json").read_text())["data"]["kind"] == "text"


def test_a_run_on_other_data_leaves_its_own_results(capsys, folder):
    """The same bytes elsewhere are its own."""
    write_store(folder / "other", "text", {"train": TEXT[:5000], "valid": TEXT[5000:6000]})
    code, out, _ = run(capsys, folder / "run", "--data", folder / "other")
    assert (code, "wrote" in out) == (0, False)
    (folder / "data").rename(folder / "moved")
    code, out, _ = run(capsys, folder / "run", "--data", folder / "moved")
    assert (code, "wrote" in out) == (0, True)


def test_images(capsys, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, 7 * 48, np.uint8)
    write_store(tmp_path / "data", "images", {"train": images, "valid": images}, item=(4, 4, 3))
    model = SparseTransformer(replace(MODEL, context=48, embedding="image(4, 4, 3)"))
    torch.nn.init.normal_(model.output.weight)
    model.save_pretrained(tmp_path / "model")
    code, out, _ = run(
        capsys, tmp_path / "model", "--data", tmp_path / "data", "--json", tmp_path / "a.json", "--most-bytes", 250
    )
    assert code == 0
    assert "bits per dim = bits per byte" in out
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (row["bytes"], row["windows"]) == (240, 5)  # Whole ones.
    assert row["bits_per_byte"] == bits_per_byte(model, images[:240].reshape(5, 4, 4, 3)).bits_per_byte
    for words, says in (
        (["--min-context", 3], "eval: min_context is for streams, got 3 with items: each item is scored without context"),
        (["--most-bytes", 47], "eval: most_bytes must be at least 48, got 47"),
    ):
        assert run(capsys, tmp_path / "model", "--data", tmp_path / "data", *words) == (2, "", f"longstride: {says}\n")


def test_data_of_another_kind_is_scored_with_a_remark(capsys, folder):
    """A saved model has its kind in its card. Bytes may be anything."""
    SparseTransformer.from_pretrained(folder / "run").save_pretrained(folder / "model")
    for kind, rate in (("text", None), ("audio", 4000), ("bytes", None)):
        write_store(folder / kind, kind, {"train": TEXT[:5000], "valid": TEXT[5000:6000]}, rate=rate)
    says = f"eval: {folder / 'audio'} has audio, and the model was trained on text; give other --data unless you mean this"
    for card, kind, has_remark in (
        (None, "audio", False), ("text", "audio", True), ("text", "text", False), ("text", "bytes", False),
        ("bytes", "audio", False),
    ):  # fmt: skip
        if card:
            write_card(folder / "model", Card("model", card), MODEL)
        code, _, err = run(capsys, folder / "model", "--data", folder / kind)
        assert (code, says in err.splitlines()) == (0, has_remark)
    code, _, err = run(capsys, folder / "run", "--data", folder / "audio")
    assert (code, err.splitlines().count(says)) == (0, 1)
    code, _, err = run(capsys, folder / "run")
    assert (code, "trained on" in err) == (0, False)


def test_data_that_does_not_fit(capsys, folder):
    images = TEXT[: 2 * 48]
    write_store(folder / "images", "images", {"train": images, "valid": images}, item=(4, 4, 3))
    write_store(folder / "wide", "images", {"train": images, "valid": images}, item=(2, 8, 3))
    SparseTransformer(replace(MODEL, context=48, embedding="image(4, 4, 3)")).save_pretrained(folder / "model")
    for where, data, says in (
        (
            "run",
            "images",
            f"{folder / 'images'} has images of 4 x 4 x 3, and the model's context of 64 bytes is not one image",
        ),
        ("model", "wide", f"{folder / 'wide'} has images of 2 x 8 x 3, and the model is for images of 4 x 4 x 3"),
        ("model", "data", f"{folder / 'data'} has text, and the model is for images of 4 x 4 x 3"),
    ):
        assert run(capsys, folder / where, "--data", folder / data) == (
            2,
            "",
            f"longstride: eval: {says}; give other --data\n",
        )


MISTAKES = [
    ("run --split tset", "data: there is no split 'tset'; it has train, valid, test"),
    ("run --min-context 64", "eval: min_context must be less than the model's context = 64, got 64: a window must have at"),
    ("run --min-context 0 -1", "eval: min_context must be at least 0, got -1"),
    ("run --min-context 8 8", "eval: min_context must be one or more different ones, got [8, 8]"),
    ("run --batch 0", "eval: batch must be at least 1, got 0"),
    ("run --most-bytes 0", "eval: most_bytes must be at least 1, got 0"),
    ("run --data nowhere", "nowhere does not exist; give a file or a folder"),
    ("run --checkpoint step-7", "eval: run has no checkpoint 'step-7'; it has step-5, step-10; --keep of train"),
    ("run --checkpoint ../..", "eval: run has no checkpoint '../..'; it has step-5, step-10; "),
    ("run --json nowhere/a.json", "eval: json = 'nowhere/a.json' cannot be written: there is no folder nowhere; make it"),
    ("run --json data", "eval: json = 'data' cannot be written: it is a folder"),
    ("model", "eval: --data must be given: model is a saved model, which does not name its data"),
    ("model --data data --checkpoint step-5", "eval: checkpoint = 'step-5' is for runs, and model is a saved model; leave"),
    ("data", "eval: data is no run and no saved model: it has no config.json"),
    ("nowhere", "eval: nowhere is no run and no saved model: there is no such folder"),
    (
        "young",
        "eval: young has no weights yet: model.safetensors comes with its first validation, after step 6; wait",
    ),
    ("begun", "after step 6; wait for it, or give begun/checkpoints/step-10\n"),
    ("lost", "eval: gone, which lost was trained on, is not here; give --data"),
    (
        "changed",
        "eval: data has other bytes in valid than when changed began; bring them back from a copy, or add --data data",
    ),
    (
        "broken",
        "broken/config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
        "bring the file back from a copy, or give another folder\n",
    ),
    ("foreign", "foreign/config.json describes no run and no saved model; give another folder, or bring their file back"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_one_line_and_leave_nothing(capsys, monkeypatch, folder, words, says):
    monkeypatch.chdir(folder)
    text = (folder / "run/config.json").read_text().replace(str(folder / "data"), "data")
    (folder / "run/config.json").write_text(text)
    SparseTransformer.from_pretrained(folder / "run").save_pretrained(folder / "model")
    for name in ("young", "begun", "lost", "changed", "broken", "foreign"):
        shutil.copytree("run", name)
    for name in ("young", "begun"):
        (folder / name / "model.safetensors").unlink()
    shutil.rmtree("young/checkpoints")
    (folder / "lost/config.json").write_text(text.replace('"data": "data"', '"data": "gone"'))
    (folder / "broken/config.json").write_text("{")
    (folder / "foreign/config.json").write_text('{"name": "a web page"}')
    known = json.loads((folder / "data/manifest.json").read_text())
    known["splits"]["valid"]["sha256"] = "0" * 64
    (folder / "changed/data.json").write_text(json.dumps(known))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith("longstride: ")
    assert says in err
    assert len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_bytes_that_are_not_those_of_the_manifest(capsys, folder):
    path = folder / "data/valid.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    code, _, err = run(capsys, folder / "run")
    assert code == 2
    assert f"{path} has SHA-256 " in err


def test_a_damaged_checkpoint(capsys, folder):
    path = folder / "run/checkpoints/step-5/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    code, _, err = run(capsys, folder / "run", "--checkpoint", "step-5")
    assert code == 2
    assert "step-5 is damaged: model.safetensors has other bytes than its manifest.json says" in err


def test_finished_rows_are_kept_when_it_is_interrupted(capsys, folder, monkeypatch):
    import longstride.commands.evaluate

    def interrupted(*given, min_context, **more):
        if min_context == 32:
            raise KeyboardInterrupt
        return bits_per_byte(*given, min_context=min_context, **more)

    monkeypatch.setattr(longstride.commands.evaluate, "bits_per_byte", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)  # Threads of other tests may still be there.
    code, out, err = run(capsys, folder / "run", "--min-context", 0, 32)
    assert (code, out) == (130, "")
    assert err.endswith("longstride: interrupted\n")
    found = json.loads((folder / "run/eval-valid.json").read_text())
    assert [row["min_context"] for row in found["rows"]] == [0]


def test_rows_of_the_same_evaluation_stay(capsys, folder):
    path = folder / "run/eval-valid.json"
    run(capsys, folder / "run", "--min-context", 32, 0)
    before = json.loads(path.read_text())
    assert [row["min_context"] for row in before["rows"]] == [0, 32]
    code, out, _ = run(capsys, folder / "run", "--min-context", 60, 0, "--batch", 3)
    assert code == 0
    assert out.count("2,000") == 2  # The table has what was asked for.
    found = json.loads(path.read_text())
    assert [row["min_context"] for row in found["rows"]] == [0, 32, 60]
    assert [row["batch"] for row in found["rows"]] == [3, None, 3]
    assert found["rows"][1] == before["rows"][1]
    run(capsys, folder / "run", "--precision", "bfloat16")  # Another evaluation, by another name.
    assert json.loads(path.read_text()) == found
    assert (folder / "run/eval-valid-bfloat16.json").is_file()
    run(capsys, folder / "run", "--precision", "float32")  # Which it has anyway.
    assert json.loads(path.read_text())["rows"][1:] == found["rows"][1:]
    # The run has gone on, and has found better weights.
    shutil.copy(folder / "run/checkpoints/step-5/model.safetensors", folder / "run/model.safetensors")
    run(capsys, folder / "run", "--min-context", 8)
    assert [row["min_context"] for row in json.loads(path.read_text())["rows"]] == [8]


def test_another_process_may_have_added_rows(capsys, folder, monkeypatch):
    import longstride.commands.evaluate

    path = folder / "run/eval-valid.json"

    def meanwhile(*given, min_context, **more):
        if min_context == 32:
            monkeypatch.undo()
            run(capsys, folder / "run", "--min-context", 9)
        return bits_per_byte(*given, min_context=min_context, **more)

    monkeypatch.setattr(longstride.commands.evaluate, "bits_per_byte", meanwhile)
    run(capsys, folder / "run", "--min-context", 0, 32)
    assert [row["min_context"] for row in json.loads(path.read_text())["rows"]] == [0, 9, 32]


def test_rows_of_an_earlier_version(capsys, folder):
    """It said once for all of them how they were made."""
    path = folder / "run/eval-valid.json"
    run(capsys, folder / "run", "--batch", 5)
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    how = {name: row.pop(name) for name in ("batch", "processes", "machine")}
    path.write_text(json.dumps({**found, **how, "min_context": [0], "rows": [row]}))
    run(capsys, folder / "run", "--min-context", 9)
    first, second = json.loads(path.read_text())["rows"]
    assert first == {**row, **how}
    assert (second["min_context"], second["batch"]) == (9, None)


def test_what_an_evaluation_depends_on(capsys, folder):
    """Of another precision, split, part or data it is another one."""
    path = folder / "mine.json"
    words = [folder / "run", "--json", path]
    assert run(capsys, *words)[0] == 0
    before = path.read_bytes()
    shutil.copytree(folder / "data", folder / "other")
    write_store(folder / "new", "text", {"train": TEXT[:99], "valid": TEXT[:2000]})
    for more, code in (
        (["--precision", "bfloat16"], 2),
        (["--split", "test"], 2),
        (["--most-bytes", 100], 2),
        (["--data", folder / "new"], 2),
        (["--checkpoint", "step-5"], 2),
        (["--data", folder / "other", "--min-context", 0], 0),
    ):
        assert run(capsys, *words, *more)[0] == code
        assert (path.read_bytes() == before) == (code == 2)
    # In the run too: the file has the name of another evaluation of the same weights.
    shutil.copy(path, folder / "run/eval-test.json")
    assert run(capsys, folder / "run", "--split", "test")[0] == 2
    # Rows of the same evaluation stay in any case.
    assert run(capsys, *words, "--min-context", 9, "--force")[0] == 0
    assert [row["min_context"] for row in json.loads(path.read_text())["rows"]] == [0, 9]


def test_a_pipe_is_not_read_for_rows(capsys, folder):
    os.mkfifo(folder / "mine.json")
    code, _, err = run(capsys, folder / "run", "--json", folder / "mine.json")
    assert code == 2
    assert "exists and is no evaluation" in err


@pytest.mark.parametrize("there", ["precious", "[]", '{"rows": []}', "\xff\xfe"])
def test_what_is_no_evaluation_is_not_replaced(capsys, folder, there):
    path = folder / "mine.json"
    path.write_bytes(there.encode("latin-1"))
    words = [folder / "run", "--most-bytes", 100, "--json", path]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert f"longstride: eval: json = '{path}' exists and is no evaluation; add --force to replace it" in err
    assert path.read_bytes() == there.encode("latin-1")
    assert run(capsys, *words, "--force")[0] == 0
    before = path.read_bytes()
    code, _, err = run(capsys, folder / "run", "--most-bytes", 200, "--json", path)
    assert code == 2
    assert "has an evaluation of other weights, data or settings; add --force to replace it, or give another --json" in err
    assert path.read_bytes() == before
    assert run(capsys, *words, "--min-context", 9)[0] == 0
    assert [row["min_context"] for row in json.loads(path.read_text())["rows"]] == [0, 9]


def test_a_checkpoint_by_its_folder(capsys, folder, monkeypatch):
    checkpoint = folder / "run/checkpoints/step-5"
    run(capsys, folder / "run", "--checkpoint", "step-5")
    path = folder / "run/eval-valid-step-5.json"
    before = json.loads(path.read_text())
    assert run(capsys, checkpoint, "--min-context", 9)[0] == 0
    found = json.loads(path.read_text())
    assert found["rows"][0] == before["rows"][0]
    assert [row["min_context"] for row in found["rows"]] == [0, 9]
    monkeypatch.chdir(checkpoint)
    assert run(capsys, ".", "--min-context", 10)[0] == 0
    assert [row["min_context"] for row in json.loads(path.read_text())["rows"]] == [0, 9, 10]
    code, _, err = run(capsys, checkpoint, "--checkpoint", "step-10")
    assert code == 2
    assert f"checkpoint = 'step-10', and {checkpoint} is one; give its run, {folder / 'run'}" in err
    code, _, err = run(capsys, folder / "run/checkpoints/step-7")
    assert code == 2
    assert "has no checkpoint 'step-7'; it has step-5, step-10; --keep" in err


def test_a_line_has_the_bits_per_byte_so_far():
    console = Console(file=io.StringIO(), width=120)
    with Progress(1000, console, name="min context 0") as progress:
        for done in range(1, 21):
            show_score(progress, True, done / 20, 25 * done, 25.0 * done)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1] == "min context 0  1,000 of 1,000 bytes  1.4427 bits/byte  0:00 left"


def by_command(words):
    cli.main(["eval", *words, "--device", "cpu"])


def test_two_processes_agree_with_one_and_one_speaks(capsys, folder):
    words = [str(folder / "run"), "--min-context", "0", "40"]
    run(capsys, *words)
    path = folder / "run/eval-valid.json"
    alone = json.loads(path.read_text())
    path.unlink()
    first, second = start(by_command, words)
    shared = json.loads(path.read_text())
    for ours, theirs in zip(shared["rows"], alone["rows"], strict=True):
        assert (ours["processes"], theirs["processes"]) == (2, 1)
        assert {**ours, "seconds": 0, "processes": 0} == {**theirs, "seconds": 0, "processes": 0}
    assert f"wrote {path}" in first.out
    assert "2,000 of 2,000 bytes" in first.err
    assert "bits/byte" not in first.err  # Those of its own windows are not those of all bytes.
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
def test_torchrun(folder):
    torchrun("longstride", "eval", str(folder / "run"), "--device", "cpu")
    assert json.loads((folder / "run/eval-valid.json").read_text())["rows"][0]["processes"] == 2


def test_weights_that_change_meanwhile_are_found(folder):
    """Of two processes one has read others than the other."""
    first, second = start(by_changing_weights, str(folder / "run"))
    for done in (first, second):
        assert "model.safetensors changed while it was read; evaluate once more" in done.found


def by_changing_weights(where):
    import hashlib
    from unittest.mock import patch

    digest = hashlib.file_digest

    def other(file, name):
        found = digest(file, name)
        if "safetensors" in file.name and os.environ["RANK"] == "1":
            found.update(b"other")
        return found

    error = io.StringIO()
    ends = patch.object(os, "_exit", side_effect=SystemExit)  # As a process does that others may wait for.
    with patch.object(hashlib, "file_digest", other), patch.object(sys, "stderr", error), ends:
        try:
            cli.main(["eval", where, "--device", "cpu"])
        except SystemExit:
            return error.getvalue()
