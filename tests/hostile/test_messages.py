"""Names chosen to move a terminal's cursor, to set its title, or to be markup: nothing of it reaches a terminal."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from longstride.commands import evaluate, runs
from longstride.commands.main import main
from longstride.common.console import Progress, StandardError
from longstride.data.hashes import cached_sha256
from longstride.data.prepare import prepare
from longstride.training.manifest import check_manifest, write_manifest

NAME = "\x1b]0;title\x07\x1b[31m\u202e"


def test_the_line_of_an_error(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{NAME}.gz").write_bytes(gzip.compress(b"text")[:-9])
    with pytest.raises(SystemExit):
        main(["data", "prepare", str(tmp_path / "in"), str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert "in/\ufffd]0;title\ufffd\ufffd[31m\ufffd.gz cannot be read" in err
    assert err[:-1].isprintable()


def test_files_that_are_left_out(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("train.txt", "valid.txt", f"{NAME}.txt"):
        (tmp_path / "in" / name).write_text("text " * (1 if name.startswith(NAME) else 100))
    prepare(tmp_path / "in", tmp_path / "out")
    err = capsys.readouterr().err
    assert "left out, 5 of 1,005 bytes: \ufffd]0;title" in err
    assert err[:-1].isprintable()


def test_what_a_checkpoint_says(tmp_path, capsys):
    (tmp_path / NAME).write_text("")
    write_manifest(tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(ValueError, match="is missing") as caught:
        check_manifest(tmp_path)
    StandardError().print(str(caught.value), soft_wrap=True)
    assert capsys.readouterr().err[:-1].isprintable()


def test_lines_and_tabs_stay(capsys):
    StandardError().print("one\n\ttwo", soft_wrap=True)
    assert capsys.readouterr().err.split() == ["one", "two"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_name_of_a_bar(terminal, monkeypatch, capsys):
    monkeypatch.setattr(Console, "is_terminal", terminal)
    with Progress(10, name=NAME) as progress:
        progress.advance(10)
    assert progress.line.startswith("\ufffd]0;title\ufffd\ufffd[31m\ufffd  10 of 10 bytes")
    err = capsys.readouterr().err
    assert "\x1b]0;" not in err
    assert "\u202e" not in err


def test_brackets_in_names_are_no_markup(tmp_path, monkeypatch):
    """Of a folder 'a[' with a file 'b].txt' rich would make a closing tag."""
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr("longstride.data.hashes.LARGE", 0)
    folder = tmp_path / "a["
    folder.mkdir()
    for name in ("b].txt", "[link=x]c.txt"):
        (folder / name).write_text("text " * 100)
        prepare(folder / name, tmp_path / f"out-{name}")
    prepare(folder, tmp_path / "out")
    cached_sha256([folder / "b].txt", folder / "[link=x]c.txt"], tmp_path / "cache")
    cached_sha256([tmp_path / "a[/b].txt"], tmp_path / "cache")


def test_a_row_of_runs_is_narrow():
    row = runs._row(runs.RunState(folder=Path("a"), changed=0.0, state="done", best=1e99))
    assert row[2] == "1e+99"


def test_brackets_in_the_paths_of_an_evaluation(capsys):
    """rich would take [/b] for markup, and end with an error."""
    score = SimpleNamespace(bytes=5, min_context=0, bits_per_byte=1.5, windows=1, seconds=0.1)
    store = SimpleNamespace(splits={"valid": 10}, shown=Path("store[/b]"), item=())
    evaluate._show(SimpleNamespace(weights=Path("run[/a]")), store, "valid", [score])
    assert "run[/a] on valid of store[/b]: 5 of 10 bytes" in capsys.readouterr().out
