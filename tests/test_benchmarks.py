"""Scripts of benchmarks/ that can run at a tiny size do so."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.pages import ROOT


def test_layouts(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "layouts.json"
    monkeypatch.setattr(sys, "argv", ["layouts.py", "--tiny", "--repeats", "1", "--json", str(out)])
    runpy.run_path(str(ROOT / "benchmarks/layouts.py"), run_name="__main__")
    found = json.loads(out.read_text())
    lines = capsys.readouterr().out.splitlines()
    for part, rows in (("documents", 12), ("lengths", 4), ("groups", 2), ("llama", 6)):
        assert len(found[part]) == rows
        headings = lines.index(part) + 1
        assert lines[headings + rows + 1].startswith(f"{part}: ")
    first = found["documents"][0]
    assert first["over batch"] == pytest.approx(first["packed ms"] / first["batch ms"])
    assert first["over pairs"] == pytest.approx(first["packed ms"] / first["whole ms"] / first["share of pairs"])


def test_cpu_layouts(tmp_path, monkeypatch):
    out = tmp_path / "layouts.json"
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    monkeypatch.setattr(sys, "argv", ["cpu_layouts.py", "--tiny", "--json", str(out)])
    try:
        runpy.run_path(str(ROOT / "benchmarks/cpu_layouts.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["queries"] * 10 + ["documents"] * 10
    assert all(row["ms"] > 0 for row in rows)


def test_kernel_times(tmp_path, monkeypatch, capsys):
    out = tmp_path / "times.json"
    words = ["--tiny", "--other", str(ROOT / "src"), "--rounds", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["kernel_times.py", *words])
    runpy.run_path(str(ROOT / "benchmarks/kernel_times.py"), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert {name.split(" ", 1)[0] for name in rows} == {"tiny"}
    assert all(ratio == pytest.approx(ours / theirs) for ours, theirs, ratio in rows.values())
    assert capsys.readouterr().out.startswith(f"{len(rows)} cases")


def test_compiled_kernels(tmp_path):
    pytest.importorskip("triton.experimental.gluon")

    def script(*words):
        command = [sys.executable, ROOT / "benchmarks/compiled_kernels.py", *words]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    here = tmp_path / "here.json"
    written = script("--only", "imagenet64 column", "--write", here)
    assert re.match(r"imagenet64 column\(128\): lane_forward \d+/\d+/\d+, lane_backward \d+/\d+/\d+\n", written.stdout), (
        written
    )
    found = json.loads(here.read_text())
    same = script("--compare", here, here)
    assert (same.returncode, same.stdout.count("\n")) == (0, 2)
    assert "2 launches of 1 calls: 2 have the same PTX" in same.stdout
    forward, backward = found["calls"]["imagenet64 column(128)"]
    forward["ptx"] = "other"  # With as many of each instruction.
    backward |= {"ptx": "other", "registers": backward["registers"] + 1}
    (tmp_path / "there.json").write_text(json.dumps(found))
    other = script("--compare", here, tmp_path / "there.json")
    assert other.returncode == 1
    assert "0 have the same PTX, 1 the same instructions in another order; 1 lines differ" in other.stdout
    assert "imagenet64 column(128): lane_backward, registers/stack/shared" in other.stdout
    (tmp_path / "none.json").write_text(json.dumps({**found, "calls": {}}))
    none = script("--compare", tmp_path / "none.json", here)
    assert (none.returncode, "1 calls are in one version only" in none.stdout) == (1, True)


def test_serve_rate(tmp_path, monkeypatch, capsys):
    """But for HTTP, which takes a server in a process of its own."""
    out = tmp_path / "rate.json"
    words = ["--preset", "text-small", "--streams", "2", "1", "--position", "9", "--bytes", "150", "--rounds", "1"]
    words += ["--parts", "bench", "exact", "engine", "--compared-bytes", "9", "--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["serve_rate.py", *words])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(ROOT / "benchmarks/serve_rate.py"), run_name="__main__")
    found = json.loads(out.read_text())
    assert found["exact"] == {"exact": "2 of 2", "default": "2 of 2"}
    for streams in ("2", "1"):
        row = found["engine"][streams]
        assert row["share"] == pytest.approx(row["bytes_per_second"] / found["bench"][streams], abs=0.001)
    assert "answers that are those alone: exact 2 of 2, default 2 of 2" in capsys.readouterr().out
