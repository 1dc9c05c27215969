import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from longstride.commands.bench import memory
from longstride.commands.bench.memory import MemoryBenchmark, run
from longstride.commands.bench.memory_cases import check_memory_settings, stride_of
from longstride.commands.bench.memory_results import PAPER, MemoryResult, MemoryRow, read_memory
from longstride.commands.main import main
from longstride.model.memory import step_memory
from longstride.training.capture import PLAIN_STEPS, CapturedStep

KEPT = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("memory-*.json"))
QUICK = MemoryBenchmark(contexts=(64, 100), steps=3, device="cpu")


def quiet():
    return Console(file=io.StringIO(), width=120)


def test_losses_fall_at_each_context(tmp_path):
    path, console = tmp_path / "result.json", quiet()
    result = run(replace(QUICK, json=path), console)
    assert [row.context for row in result.rows] == [64, 100]
    for row in result.rows:
        assert len(row.losses) == 3
        assert row.losses == sorted(row.losses, reverse=True)
        assert row.recompute == "off"
        assert min(row.predicted_gib, row.seconds, row.predicted_seconds, *row.step_seconds) > 0
        assert len(row.step_seconds) == 3
        assert row.measured_gib is row.error is row.failure is None
    assert result.limit_gib == pytest.approx(16e9 / 2**30, abs=1e-3)
    assert read_memory(path) == result
    text = console.file.getvalue()
    assert "limit 14.9 GiB of the GPU" in text
    assert "100: losses 5.545, " in text


def test_what_fits_is_trained(tmp_path):
    given = tmp_path / "bytes"
    given.write_bytes(b"ab" * 50)
    (row,) = run(replace(QUICK, contexts=(64,), recompute="host", steps=1, data=given), quiet()).rows
    assert row.recompute == "host"
    assert row.host_gib == pytest.approx(4 * 64 * 128 * 4 / 2**30, rel=1e-4)
    assert row.seconds is None  # The first step warms up.


def test_what_does_not_fit_is_a_row():
    console = quiet()
    (row,) = run(replace(QUICK, contexts=(64,), gpu_memory="1MB"), console).rows
    assert "nothing fits" in row.failure
    assert "64 did not run: nothing fits; longstride plan says what is missing" in console.file.getvalue()


def test_a_command_that_measures_nothing_fails(tmp_path, capsys):
    """Its results are written all the same."""
    words = ["--preset", "audio-small", "--contexts", "64", "--gpu-memory", "1MB", "--json", str(tmp_path / "result.json")]
    with pytest.raises(SystemExit) as ending:
        main(["bench", "memory", *words])
    assert ending.value.code == 2
    assert "bench memory: nothing could be measured: nothing fits" in capsys.readouterr().err
    assert (tmp_path / "result.json").is_file()


def test_a_file_without_rows_fails(tmp_path, capsys):
    (tmp_path / "empty.json").write_text('{"machine": {}, "settings": {}, "limit_gib": 1.0, "rows": []}')
    with pytest.raises(SystemExit) as ending:
        main(["bench", "memory", "--read", str(tmp_path / "empty.json")])
    assert ending.value.code == 2
    assert "bench memory: there are no results" in capsys.readouterr().err


def test_a_lack_of_memory_is_a_row(monkeypatch):
    def lack(*_):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(memory.Trainer, "take_step", lack)
    rows = run(QUICK, quiet()).rows
    assert [row.failure for row in rows] == ["OutOfMemoryError: too much"] * 2
    assert rows[0].predicted_gib > 0


def test_what_is_known_is_saved_after_each_step(tmp_path, monkeypatch):
    path, console, take_step = tmp_path / "result.json", quiet(), memory.Trainer.take_step

    def stop_at_the_second(self, batch):
        if self.step == 1:
            raise KeyboardInterrupt
        take_step(self, batch)

    monkeypatch.setattr(memory.Trainer, "take_step", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(replace(QUICK, json=path), console)
    (row,) = read_memory(path).rows
    assert (row.context, len(row.losses), len(row.step_seconds)) == (64, 1, 1)
    assert "64: recompute off, predicted peak" in console.file.getvalue()
    assert "64: step 1, loss 5.545, " in console.file.getvalue()


def test_a_captured_step_is_timed_from_the_replay_on(monkeypatch):
    """Plain steps, and the one that is captured, do not count."""

    class Captured(CapturedStep):
        def __call__(self, tokens):
            self.graph = self.graph or (self.calls == PLAIN_STEPS and "recorded")
            self.calls += 1
            return self.work(tokens)

    begin = memory.Trainer._begin

    def captured(self, *given):
        begin(self, *given)
        self.compute = Captured(self._compute, self.optimizers, torch.device("cpu"))

    monkeypatch.setattr(memory.Trainer, "_begin", captured)
    for steps, timed in ((PLAIN_STEPS + 1, 0), (PLAIN_STEPS + 2, 1)):
        (row,) = run(replace(QUICK, contexts=(64,), steps=steps), quiet()).rows
        assert row.seconds == (row.step_seconds[-1] if timed else None)


def test_the_papers_contexts_and_strides():
    configs = check_memory_settings(MemoryBenchmark())
    assert [config.model.context for config in configs] == list(PAPER)
    assert [config.model.pattern for config in configs] == [f"interleave(strided({l}))" for l in (256, 512, 1024)]
    assert all(150e6 < config.model.parameters < 155e6 for config in configs)
    assert stride_of(100_000) == 256


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"contexts": (0,)}, "bench memory: contexts must be at least 1"),
        ({"contexts": (64, 64)}, "bench memory: contexts must be one or more different"),
        ({"steps": 0}, "bench memory: steps must be at least 1"),
        ({"gpu_memory": "16"}, "bench memory: gpu_memory must be a size such as 16GB"),
        ({"host_memory": "x"}, "bench memory: host_memory must be a size"),
        ({"preset": "enwik9"}, "there is no preset 'enwik9'"),
        ({"recompute": "never"}, "recompute must be one of"),
        ({"data": Path("/nowhere")}, "/nowhere does not exist"),
    ],
)
def test_bad_settings(changes, says):
    with pytest.raises(ValueError, match=says):
        check_memory_settings(replace(QUICK, **changes))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="has no bytes"):
        run(replace(QUICK, data=tmp_path / "empty"), quiet())


def test_reading_prints_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_train", None)
    row = MemoryRow(65_536, 152_000_000, "on", 10.0, 10.5, 11.0, 0.0, 0.4, 0.5, [3.25, 0.5], [5.5, 5.25])
    path, console = tmp_path / "result.json", quiet()
    path.write_text(json.dumps(memory.plain(MemoryResult({"device": "a GPU"}, {}, 14.9, [row]))))
    assert run(MemoryBenchmark(read=path), console).rows == [row]
    text = console.file.getvalue()
    for words in ("65,536", "152.0", "152", "10.00", "10.50", "+5%", "0.50", "3.25", "losses 5.500, 5.250"):
        assert words in text


@pytest.mark.parametrize("content", [{"rows": [4]}, {"rows": [{"context": 4, "parameters": 3, "losses": ["x"]}]}, {}])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"machine": {}, "limit_gib": 3} | content))
    with pytest.raises(ValueError, match=r"bench memory: read = '.*' is no file of bench memory --json: "):
        run(MemoryBenchmark(read=path), quiet())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_results_fit_and_learn(path):
    result = read_memory(path)
    assert result.rows
    for row in (row for row in result.rows if len(row.losses) > 1):
        assert row.reserved_gib < result.limit_gib
        assert row.losses[-1] < row.losses[0]
        assert row.measured_gib == pytest.approx(predicted_gib(row), rel=0.05)


def predicted_gib(row):
    """What the package predicts now for the network of a row."""
    (config,) = check_memory_settings(MemoryBenchmark(contexts=(row.context,)))
    return step_memory(replace(config.model, recompute=row.recompute)).peak / 2**30


def test_a_file_of_another_benchmark_is_named():
    path = Path(__file__).parents[3] / "benchmarks/results/step-h200.json"
    with pytest.raises(ValueError, match=r"is no file of bench memory --json: it has no 'limit_gib'$"):
        read_memory(path)
