import io
import shutil

import pytest
import torch
from rich.console import Console

import longstride.benchmarks.attention as bench
from longstride import attend
from longstride.benchmarks.attention import AttentionBenchmark, run


def quiet():
    return Console(file=io.StringIO(), width=120)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="FlexAttention compiles C++")
def test_flex_attention_computes_the_same_pattern():
    """Both are measured on one job: FlexAttention with our mask must give our result."""
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    pattern = bench.parse("merged(strided(16))")[0]
    ours = attend(q, k, v, pattern)
    theirs = bench._flex(pattern, 256, q.device)(q, k, v)
    torch.testing.assert_close(ours, theirs)


def test_a_peer_that_cannot_run_is_reported(monkeypatch):
    def broken(pattern, n, device):
        def call(q, k, v):
            raise RuntimeError("no C++ compiler\nand more")

        return call

    monkeypatch.setattr(bench, "_flex", broken)
    console = quiet()
    result = run(AttentionBenchmark(lengths=(64,), patterns=("local(4)",), repeats=1), console)
    assert [row.failure for row in result.rows] == [None, None, "RuntimeError: no C++ compiler"]
    assert "did not run: RuntimeError: no C++ compiler" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_length_without_pairs_has_no_place_in_the_growth():
    settings = AttentionBenchmark(lengths=(64, 128, 256, 512), patterns=("summary(128, 32)",), peers="none", repeats=1)
    result = run(settings, quiet())
    assert result.rows[0].pairs == 0
    assert len(result.growth) == 1


def test_ours_is_what_was_asked_for():
    result = run(
        AttentionBenchmark(lengths=(64,), patterns=("block(8)",), peers="none", repeats=1, impl="reference"), quiet()
    )
    (row,) = result.rows
    assert row.pairs == 8 * 36
    assert row.faster_than_dense is None
