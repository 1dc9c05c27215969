"""Scripts of benchmarks/ that can run at a tiny size do so."""

import json
import runpy
import sys

import pytest

from tests.pages import ROOT


def test_layouts(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "layouts.json"
    monkeypatch.setattr(sys, "argv", ["layouts.py", "--tiny", "--repeats", "1", "--json", str(out)])
    runpy.run_path(str(ROOT / "benchmarks/layouts.py"), run_name="__main__")
    found = json.loads(out.read_text())
    lines = capsys.readouterr().out.splitlines()
    for part, rows in (("documents", 12), ("groups", 2), ("llama", 6)):
        assert len(found[part]) == rows
        headings = lines.index(part) + 1
        assert lines[headings + rows + 1].startswith(f"{part}: ")
    first = found["documents"][0]
    assert first["over batch"] == pytest.approx(first["packed ms"] / first["batch ms"])
    assert first["over pairs"] == pytest.approx(first["packed ms"] / first["whole ms"] / first["share of pairs"])
