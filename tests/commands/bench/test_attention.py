import io
import json
from dataclasses import replace
from functools import partial
from statistics import median

import pytest
import torch
from rich.console import Console

from longstride.commands.bench import attention, peers
from longstride.commands.bench.attention import AttentionBenchmark, run
from longstride.commands.bench.checks import SHAPES
from longstride.commands.bench.peers import Contender


def quiet():
    return Console(file=io.StringIO(), width=120)


def printed(console):
    return console.file.getvalue()


def broken(text, pattern, n, device, backend=None):
    def call(q, k, v):
        raise RuntimeError("no C++ compiler\n  and more")

    return Contender(f"Flex {text}", pattern, call)


def test_a_peer_that_cannot_run_is_reported(monkeypatch):
    monkeypatch.setattr(peers, "flex", broken)
    console = quiet()
    result = run(AttentionBenchmark(lengths=(64,), patterns=("local(4)",), repeats=1, peers="all"), console)
    assert [row.failure for row in result.rows] == [None, None, "forward: RuntimeError: no C++ compiler and more"]
    assert "Flex local(4) at n = 64 did not run, forward: RuntimeError: no C++ compiler and more" in printed(console)
    assert result.left_out == ["varlen: it runs on CUDA devices only", "Flex FLASH: it runs on CUDA devices only"]
    assert "left out: varlen: it runs on CUDA devices only" in printed(console)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return q.clone()

    @staticmethod
    def backward(ctx, slopes):
        raise NotImplementedError  # Without a message.


def test_a_peer_without_a_backward_keeps_its_forward(monkeypatch):
    def one_way(text, pattern, n, device, backend=None):
        return Contender(f"Flex {text}", pattern, lambda q, k, v: NoBackward.apply(q))

    monkeypatch.setattr(peers, "flex", one_way)
    result = run(AttentionBenchmark(lengths=(64,), patterns=("local(4)",), repeats=1, peers="all"), quiet())
    row = result.rows[-1]
    assert row.failure == "backward: NotImplementedError"
    assert row.forward_ms > 0
    assert row.both_ms is None


def test_a_failure_of_ours_is_raised_but_for_memory(monkeypatch):
    settings = AttentionBenchmark(lengths=(64,), patterns=("local(4)",), peers="none", repeats=1)

    def failing(error):
        def attend(*_, **__):
            raise error

        return attend

    monkeypatch.setattr(attention, "attend", failing(RuntimeError("a mistake")))
    with pytest.raises(RuntimeError, match="a mistake"):
        run(settings, quiet())
    monkeypatch.setattr(attention, "attend", failing(torch.OutOfMemoryError("too much")))
    assert run(settings, quiet()).rows[0].failure == "forward: OutOfMemoryError: too much"


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
    assert row.eager is row.compiled is None  # On a CPU, the time of a call is all there is.


def test_the_papers_shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "cifar10", replace(SHAPES["cifar10"], batch=2))  # For speed.
    result = run(AttentionBenchmark(shapes=("cifar10",), peers="none", repeats=1, impl="blocked"), quiet())
    assert {row.shape for row in result.rows} == {"cifar10"}
    assert [row.name for row in result.rows][:2] == ["merged(strided(96))", "merged(fixed(96, 8))"]
    limits = result.ceilings
    moved = 4 * 2 * 2 * 3072 * (64 + 64 + 128 + 128)  # float32
    for row in result.rows:
        flops = 2 * 2 * 2 * row.pairs * (4 * 64 + 3 * 128)
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


@pytest.fixture
def fake_clocks(monkeypatch):
    """A GPU's measurements on a CPU: which clock was asked for which calls, in which mode; every time is 2 s."""
    asked = []

    def seconds_each(calls, repeats, device, clock=None, within=None, pick=median):
        name = None if clock is None else clock.__name__
        assert (pick is min) == (name == "host_seconds")
        asked.append((name, tuple(calls), torch.is_grad_enabled(), repeats))
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 2.0)

    monkeypatch.setattr(attention, "seconds_each", seconds_each)
    return asked


def test_a_caller_waits_for_the_host_too(fake_clocks):
    calls = attention.Calls({"a": lambda: None, "b": lambda: None}, {"a": lambda: None})
    times = attention._caller_times(calls, 9, torch.device("cuda"))
    assert times == {
        "a": attention.CallerTimes(2e3, 2e3, 2e6, 2e6),
        "b": attention.CallerTimes(2e3, None, 2e6, None),  # It has no backward.
    }
    assert fake_clocks == [
        ("elapsed_seconds", ("a", "b"), False, 3),
        ("elapsed_seconds", ("a",), True, 3),
        ("host_seconds", ("a", "b"), False, 3),
        ("host_seconds", ("a",), True, 3),
    ]
    assert attention._caller_times(calls, 2, torch.device("cpu"))["a"] == attention.CallerTimes(2e3, 2e3)
    assert fake_clocks[-1] == (None, ("a",), True, 2)


@pytest.mark.parametrize("chosen", [("64",), ("all",)])
def test_chosen_lengths_are_compiled(monkeypatch, fake_clocks, chosen):
    compiled = []

    def fake_compile(call, **options):
        compiled.append(options)
        return call

    monkeypatch.setattr(torch, "compile", fake_compile)
    settings = AttentionBenchmark(lengths=(32, 64), patterns=("block(8)",), repeats=1, compile=chosen)
    console = quiet()
    rows = {(row.n, row.name): row for row in run(settings, console).rows}
    lengths = (32, 64) if chosen == ("all",) else (64,)
    for (n, name), row in rows.items():
        assert (row.compiled is not None) == (n in lengths and name in ("SDPA dense", "block(8)")), (n, name)
    assert compiled == [{"fullgraph": True, "dynamic": False}] * 2 * len(lengths)
    assert "n = 64, a caller's time under torch.compile(fullgraph=True)" in printed(console)


def test_compiled_times_come_last_and_are_saved_shape_by_shape(tmp_path, monkeypatch, fake_clocks):
    path, saved = tmp_path / "result.json", []

    def stop_at_the_fourth(call, **options):
        saved.append([(row["n"], row["name"], bool(row["compiled"])) for row in json.loads(path.read_text())["rows"]])
        if len(saved) == 4:
            raise KeyboardInterrupt
        return call

    monkeypatch.setattr(torch, "compile", stop_at_the_fourth)
    settings = AttentionBenchmark(lengths=(32, 64), patterns=("local(8)",), repeats=1, compile=("all",), json=path)
    with pytest.raises(KeyboardInterrupt):
        run(settings, quiet())
    every = [(n, name) for n in (32, 64) for name in ("SDPA dense", "local(8)")]
    assert saved == [[(*one, number < done) for number, one in enumerate(every)] for done in (0, 0, 2, 2)]


def test_compiled_contenders_take_turns_and_share_no_compiled_code(monkeypatch, fake_clocks):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: (compiled.append(call), call)[1])
    settings = AttentionBenchmark(lengths=(64,), patterns=("local(8)", "block(8)"), peers="sdpa", repeats=1, compile=("64",))
    run(settings, quiet())
    assert fake_clocks[-1][1] == ("SDPA dense", "local(8)", "block(8)")
    assert len({id(call.__code__) for call in compiled}) == len(compiled) == 3


def test_a_call_that_does_not_compile_is_reported(monkeypatch):
    def refuse(call, **options):
        def compiled(*_):
            raise RuntimeError("no compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    result = run(AttentionBenchmark(lengths=(64,), patterns=("block(8)",), repeats=1, compile=("64",)), quiet())
    assert [row.failure for row in result.rows if not row.name.startswith("SDPA view")] == [
        "compiled forward: RuntimeError: no compiler"
    ] * 2
    assert all(row.both_ms for row in result.rows)


def test_ours_compiles_whole(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    settings = AttentionBenchmark(lengths=(64,), patterns=("block(8)",), peers="none", repeats=1, compile=("64",))
    (row,) = run(settings, quiet()).rows
    assert row.failure is None
    assert row.compiled.forward_ms > 0
    assert row.compiled.both_ms > 0


def test_only_measured_shapes_can_be_compiled():
    settings = AttentionBenchmark(lengths=(64, 128), patterns=("block(8)",))
    with pytest.raises(ValueError, match="compile has 'enwik8', which is not measured; give 64, 128 or all"):
        run(replace(settings, compile=("enwik8",)), quiet())
