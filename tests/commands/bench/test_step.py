import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from longstride.commands.bench import step, step_peers
from longstride.commands.bench.measure import Ceilings
from longstride.commands.bench.report import print_table
from longstride.commands.bench.step import NEVER, Ours, StepBenchmark, model_flops, run
from longstride.commands.bench.step_cases import PAPER, check_step, read_case
from longstride.commands.bench.step_peers import PlainNetwork, PlainTraining, missing
from longstride.commands.bench.step_results import PLAIN_DENSE, PLAIN_NONE, StepResult, StepRow, comparisons, read_steps
from longstride.model import SparseTransformer
from longstride.training import capture
from tests.model import small

CPU = torch.device("cpu")
QUICK = "layers=1 width=32 heads=2 context=64 pattern=local(8) embedding=matrix(8) batch=2"
QUICK_DENSE = QUICK.replace("local(8)", "dense()")
KEPT = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("step-*.json"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(step, "ceilings", lambda dtype, device: Ceilings(1e6, 1e9))


def quiet():
    return Console(file=io.StringIO(), width=120)


def case(text="audio-small", **changes):
    return read_case(text, StepBenchmark(**changes), compiled=False)


def test_ours_with_two_patterns_beside_the_plain_network(tmp_path):
    path, console = tmp_path / "result.json", quiet()
    cases = (f"audio-small {QUICK}", f"audio-small {QUICK_DENSE}")
    result = run(StepBenchmark(cases=cases, steps=2, rounds=1, device="cpu", json=path), console)
    assert [row.name for row in result.rows] == [cases[0], PLAIN_DENSE, PLAIN_NONE, cases[1]]
    assert len({row.network for row in result.rows}) == 1
    for row in result.rows:
        assert row.bytes_per_second * row.plain_ms == pytest.approx(2 * 64 * 1e3, rel=1e-3)
        assert row.captured_ms is row.host_share is row.plain_gib is row.failure is None
        assert row.first_step_seconds > 0
        assert 0 < row.last_loss < 8
    sparse, plain, floor, dense = (row.matrix_share * row.plain_ms for row in result.rows)
    assert floor < sparse < dense == pytest.approx(plain, rel=1e-3)
    assert read_steps(path) == result
    text = console.file.getvalue()
    assert "2 x 64 bytes, 0.0 million parameters" in text
    assert f"audio-small {QUICK}: " in text
    assert f"times as fast as {PLAIN_DENSE}" in text


def test_a_peer_that_fails_is_reported_and_ours_is_raised(monkeypatch):
    def fail(*_):
        raise TypeError("no kernel\nfor this")

    settings = StepBenchmark(cases=(f"audio-small {QUICK}",), steps=1, rounds=1, device="cpu")
    monkeypatch.setattr(PlainTraining, "take_step", fail)
    console = quiet()
    rows = run(settings, console).rows
    assert [row.failure for row in rows] == [None, *["TypeError: no kernel for this"] * 2]
    assert "plain, dense of audio-small" in console.file.getvalue()
    monkeypatch.setattr(Ours, "take_step", fail)
    with pytest.raises(TypeError, match="no kernel"):
        run(settings, quiet())


def test_a_lack_of_memory_of_ours_is_a_row(monkeypatch):
    def lack(*_):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(Ours, "take_step", lack)
    settings = StepBenchmark(cases=(f"audio-small {QUICK}",), steps=1, rounds=1, device="cpu", peers="none")
    (row,) = run(settings, quiet()).rows
    assert row.failure == "OutOfMemoryError: too much"


class FakeTraining:
    """Counts its steps, plain and captured."""

    plain_because = ""

    def __init__(self, fails=False):
        self.plain = self.replayed = self.waited = 0
        self.captured = capture.CapturedStep(self.work, [], CPU, lambda line: setattr(self, "plain_because", line))
        self.fails = fails

    def work(self, tokens):
        self.plain += 1
        return tokens

    def take_step(self, number):
        self.captured(torch.zeros(2))

    def finish(self):
        self.waited += 1
        return 5.0

    def close(self):
        pass

    def record(self, work, stream):
        if self.fails:
            raise RuntimeError("not here")

        def replay():
            self.replayed += 1

        return capture.Graph(replay, torch.zeros(2))


@pytest.mark.parametrize("fails", [False, True])
def test_steps_run_plainly_first_and_are_captured_then(monkeypatch, fails):
    training = FakeTraining(fails)
    monkeypatch.setattr(capture, "record", training.record)
    measured = step._time(StepBenchmark(steps=5, rounds=2), training, CPU)
    each = step.WARM_UP - 1 + 5 * 2
    assert (training.plain, training.replayed) == ((1 + 2 * each, 0) if fails else (1 + each, each))
    assert ("captured_ms" in measured) != fails
    if fails:
        assert measured["plain_because"] == "steps run without a CUDA graph, as the capture failed: not here"
    assert measured["last_loss"] == 5.0
    assert training.captured.plain_steps < NEVER


def test_the_plain_network_has_the_parameters_of_ours():
    config = small.config()
    plain, ours = PlainNetwork(config, has_attention=True), SparseTransformer(config)
    assert sum(x.numel() for x in plain.parameters()) == ours.parameter_count()


@torch.no_grad()
def test_the_plain_network_computes_what_ours_does(monkeypatch):
    """With the weights of ours, dense attention and our gelu."""
    config = small.config(pattern="dense()", qk_ratio=0.5)
    plain, ours = PlainNetwork(config, has_attention=True).double(), small.model(pattern="dense()", qk_ratio=0.5).double()
    monkeypatch.setattr(step_peers.F, "gelu", lambda x: x * torch.sigmoid(1.702 * x))
    generator = torch.Generator().manual_seed(3)
    renamed = {
        "embedding": "embedding.token", "start": "embedding.start", "positions.0": "embedding.position.row",
        "positions.1": "embedding.position.column", "query_key_value": "attention.query_key_value",
        "project": "attention.project", "inner": "ff.inner", "outer": "ff.outer",
    }  # fmt: skip
    given = dict(ours.named_parameters())
    for name, mine in plain.named_parameters():
        its = next(given[other] for other in candidates(name, renamed) if other in given)
        mine.normal_(generator=generator)
        its.copy_(mine)
    plain.precision = torch.float64
    ours.config = replace(config, precision="float64")
    tokens = small.some_bytes()
    assert float(plain.loss(tokens)) == pytest.approx(float(ours.loss(tokens)), rel=1e-6)


def candidates(name, renamed):
    yield name
    for mine, its in renamed.items():
        yield name.replace(mine, its, 1)


def test_without_attention_positions_see_only_themselves():
    plain = PlainNetwork(small.config(), has_attention=False)
    torch.nn.init.normal_(plain.output.weight)
    tokens = small.some_bytes(batch=1)
    other = tokens.clone()
    other[0, 0] += 1
    one, two = (plain.blocks[0](plain.embedding(x)) for x in (tokens, other))
    assert torch.equal(one[0, 1:], two[0, 1:])
    assert not torch.equal(one[0, 0], two[0, 0])


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_the_plain_network_learns(recompute):
    config = replace(case(f"audio-small {QUICK}").config, accumulate=2)
    config = replace(config, model=replace(config.model, recompute=recompute))
    training = PlainTraining(config, CPU, has_attention=True)
    losses = []
    for number in range(3):
        training.take_step(number)
        losses.append(training.finish())
    assert losses[0] == pytest.approx(5.545, abs=1e-3)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"embedding": "rotary"}, "is_rotary"), ({"norm": "rms"}, "norm"), ({"last_bytes": 2}, "last_bytes")],
)
def test_networks_that_have_no_plain_peer(changes, reason):
    assert missing(small.config()) is None
    assert missing(small.config(**changes)) == f"the plain network has no {reason}"


def test_a_network_without_a_peer_is_said_to_be_left_out():
    text = f"audio-small {QUICK} norm=rms"
    result = run(StepBenchmark(cases=(text,), steps=1, rounds=1, device="cpu"), quiet())
    assert len(result.rows) == 1
    assert result.left_out[0].endswith("the plain network has no norm")


def test_flops_count_no_recomputation():
    model = small.config(recompute="on")
    assert model_flops(model, True) == model_flops(replace(model, recompute="off"), True) > model_flops(model, False)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_results_are_read(path):
    assert read_steps(path).rows


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"machine": {}, "ceilings": {"bytes_per_second": 1, "flops_per_second": 1}, "rows": [4]}))
    with pytest.raises(
        ValueError, match=r"bench step: read = '.*' is no file of bench step --json: a StepRow must be an obj"
    ):
        run(StepBenchmark(read=path), quiet())


def test_reading_prints_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "_measure", None)
    rows = [StepRow("enwik8", "enwik8", "x", 8, 12_288, 95_000_000, 230.0, 210.0, 468_000.0, 0.5, 0.087, 40.0, 41.0, 12.0)]
    rows += [replace(rows[0], name=PLAIN_DENSE, captured_ms=420.0, plain_ms=421.0)]
    path, console = tmp_path / "result.json", quiet()
    path.write_text(json.dumps(step.plain(StepResult({"device": "a GPU"}, {}, Ceilings(1.0, 8e14), rows))))
    run(StepBenchmark(read=path), console)
    text = console.file.getvalue()
    for words in ("8 x 12,288 bytes, 95.0 million", "210.0", "0.468", "50.0%", "9%", "41.0", "12.0 s"):
        assert words in text
    assert comparisons(rows) == ["enwik8: 2.00 times as fast as plain, dense"]


def test_numbers_are_whole_on_a_narrow_console():
    """Names are folded."""
    out = io.StringIO()
    names = "enwik8 pattern=interleave(strided(128)) recompute=selective dropout=0.4"
    print_table(Console(file=out, width=80), "steps", ["name"], [f"h{i}" for i in range(6)], [[names, *["1,234.56"] * 6]])
    assert out.getvalue().count("1,234.56") == 6
    assert "…" not in out.getvalue()


def test_the_cases_by_default_are_those_of_the_committed_file():
    content = json.loads((Path(__file__).parents[3] / "benchmarks/results/step-h200.json").read_text())
    ours = {row["name"] for row in content["rows"] if not row["name"].startswith("plain")}
    assert ours == set(PAPER)


def test_automatic_recomputation_is_refused():
    with pytest.raises(ValueError, match="recompute = 'auto' is chosen by longstride train; give what longstride plan"):
        check_step(StepBenchmark(cases=("enwik8 recompute=auto",)))
