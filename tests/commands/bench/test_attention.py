import io
import json

import pytest
from rich.console import Console

from longstride.commands.bench import attention, peers
from longstride.commands.bench.attention import AttentionBenchmark, run


def quiet():
    return Console(file=io.StringIO(), width=120)


def test_a_peer_that_cannot_run_is_reported(monkeypatch):
    def broken(pattern, n, device):
        def call(q, k, v):
            raise RuntimeError("no C++ compiler\nand more")

        return call

    monkeypatch.setattr(peers, "flex", broken)
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


def test_the_papers_shapes():
    console = quiet()
    result = run(AttentionBenchmark(shapes=("cifar10",), peers="none", repeats=1, impl="blocked"), console)
    assert {row.shape for row in result.rows} == {"cifar10"}
    assert [row.name for row in result.rows][:2] == ["merged(strided(96))", "merged(fixed(96, 8))"]
    limits = result.ceilings
    moved = 4 * 32 * 2 * 3072 * (64 + 64 + 128 + 128)  # float32
    for row in result.rows:
        flops = 2 * 32 * 2 * row.pairs * (4 * 64 + 3 * 128)
        assert row.forward_of_bytes * row.forward_ms / 1e3 * limits.bytes_per_second == pytest.approx(moved, rel=0.02)
        assert row.both_of_flops * row.both_ms / 1e3 * limits.flops_per_second == pytest.approx(flops, rel=0.02)


def test_results_are_kept_as_they_come(tmp_path, monkeypatch):
    measure = attention._measure

    def fails_at_the_second(settings, shape, *rest):
        if shape.n == 32:
            raise MemoryError
        return measure(settings, shape, *rest)

    monkeypatch.setattr(attention, "_measure", fails_at_the_second)
    path = tmp_path / "result.json"
    settings = AttentionBenchmark(lengths=(16, 32), patterns=("local(4)",), peers="none", repeats=1, json=path)
    with pytest.raises(MemoryError):
        run(settings, quiet())
    assert [row["n"] for row in json.loads(path.read_text())["rows"]] == [16]
