"""The scripts of examples/ run, at small sizes."""

import ast
import json
import runpy
import sys

import matplotlib
import pytest

from longstride.data import samples
from tests.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    (tmp_path / "book.txt").write_bytes(samples.text()[:40_000])

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_own_module(run_example):
    last = run_example("own_module.py", "--n", "256", "--steps", "30").splitlines()[-1]
    assert float(last.split()[2]) < 0.5  # It began at log(16) = 2.77.


def test_train_file_then_sample_and_plot(run_example, tmp_path):
    assert "test: " in run_example("train_file.py", "book.txt", "--steps", "2", "--layers", "1")
    assert "In 1945" in run_example("sample_and_plot.py", "run")
    assert (tmp_path / "sample_and_plot.png").stat().st_size > 1000


def test_transformers_models(run_example, tmp_path):
    pytest.importorskip("transformers")
    lines = run_example("transformers_models.py", "--steps", "3").splitlines()
    assert [line.split()[0] for line in lines if line.endswith("nats")] == ["Llama", "Longstride"]
    assert "In 1945 " in "".join(lines)
    assert (tmp_path / "model/longstride_code.py").is_file()


def test_finetune_transformers(run_example, tmp_path):
    pytest.importorskip("transformers")
    arguments = "--steps", "2", "--more", "1", "--held-out", "512", "--json", "out.json"
    lines = run_example("finetune_transformers.py", *arguments).splitlines()
    found = json.loads((tmp_path / "out.json").read_text())["bits_per_byte"]
    assert [line.split("  ")[0] for line in lines if line.endswith("bits per byte")] == list(found)
    assert list(found) == [
        "dense", "merged, switched", "merged, fine-tuned", "a pattern per layer, switched",
        "a pattern per layer, fine-tuned", "dense, as many more steps",
    ]  # fmt: skip
    assert len(set(found.values())) == 6  # Each is of another network.
    assert all(3 < bits < 8 for bits in found.values())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_opens_with_its_command(path):
    assert f"\npython examples/{path.name}" in (ast.get_docstring(ast.parse(path.read_text())) or "")
