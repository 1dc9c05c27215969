import gc
import json
import shutil
import signal
import weakref
from dataclasses import replace

import pytest
import torch

from longstride.commands.main import main
from longstride.commands.reproduce import runner
from longstride.commands.reproduce.experiments import TABLE_2, config_of
from longstride.commands.reproduce.results import read_results
from longstride.data import samples
from longstride.data.store import write_store
from longstride.training import loop, train
from longstride.training.metrics import read_metrics
from longstride.training.trainer import Trainer

DENSE, FIXED, IMAGES = "enwik8-dense", "enwik8-fixed", "cifar10-strided"


def reproduce(experiment, out, *words):
    main(["reproduce", experiment, "--scale", "tiny", "--out", str(out), *words])
    return read_results(out / f"{experiment}.json")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Three rows of table 2."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    reproduce("table2", out, "--rows", DENSE, FIXED, IMAGES)
    return out


@pytest.fixture
def done(once, tmp_path):
    """A copy of these rows."""
    shutil.copytree(once, tmp_path / "out")
    return tmp_path / "out"


def refuse(*_, **__):
    raise AssertionError("it is trained again")


def test_rows_are_runs_with_results(once):
    result = read_results(once / "table2.json")
    assert [row.name for row in result.rows] == [DENSE, FIXED, IMAGES]
    for row in result.rows:
        assert (row.done, row.steps, row.failure) == (1, 4, None)
        assert row.validation_steps == [1, 2, 3, 4]
        (score,) = row.scores
        assert 7 < score.bits_per_byte < 8.1
        assert row.step_seconds > 0
        assert row.wall_seconds > row.seconds
        assert row.machine["torch"] == torch.__version__
        config = json.loads((once / f"{row.name}-seed-0" / "config.json").read_text())
        assert config["model"]["pattern"] == row.pattern
        assert row.bytes == 4 * config["batch"] * config["model"]["context"]
        assert read_metrics(once / f"{row.name}-seed-0")[-1]["valid_bits_per_byte"] == pytest.approx(row.validation_bits[-1])
        assert row.command.startswith(f"longstride train {'cifar10' if row.data == 'images' else 'enwik8'} ")
    assert result.command.startswith("longstride reproduce table2 --out ")
    assert (once / "table2.png").is_file()


def test_rows_that_are_done_are_skipped(done, monkeypatch, capsys):
    before = read_results(done / "table2.json").rows
    monkeypatch.setattr(runner, "train", refuse)
    monkeypatch.setattr(runner, "evaluate", refuse)
    shutil.rmtree(done / f"{DENSE}-seed-0")  # The results are enough.
    assert reproduce("table2", done, "--rows", DENSE, FIXED, IMAGES).rows == before
    assert capsys.readouterr().out.count(" is done") == 3


def test_a_network_that_another_table_has_trained_is_only_scored(done, monkeypatch, capsys):
    monkeypatch.setattr(loop.Trainer, "take_step", refuse)
    (row,) = reproduce("table3", done).rows
    assert [score.min_context for score in row.scores] == [0, 192, 288, 336, 372, 378, 380]
    assert "12,160" not in capsys.readouterr().out
    given = reproduce("table3", done.parent / "given", "--run", str(done / f"{FIXED}-seed-0")).rows[0]
    assert given.scores[1].bits_per_byte == row.scores[1].bits_per_byte
    assert (given.context, given.steps) == (384, 0)
    assert f"{done / FIXED}-seed-0: 512 bytes scored; context 384" in capsys.readouterr().out.replace("\n", "")


def test_a_stopped_row_goes_on(done, tmp_path):
    (row,) = (row for row in TABLE_2.rows if row.name == FIXED)
    other = tmp_path / "other"
    config = config_of(row, "tiny", on_gpu=False)
    folder = other / f"{FIXED}-seed-0"
    train(replace(config, data=str(samples.path("text")), out=str(folder)), until=2, preset=row.preset)
    (resumed,) = reproduce("table2", other, "--rows", FIXED).rows
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4]
    whole = read_results(done / "table2.json").find(FIXED, 0)
    assert resumed.validation_bits == whole.validation_bits
    assert resumed.scores[0].bits_per_byte == whole.scores[0].bits_per_byte


def test_an_interrupted_row_is_not_scored(tmp_path, monkeypatch, capsys):
    def interrupted(config, *_, **__):
        return replace(train(config, until=2), signal=15)

    monkeypatch.setattr(runner, "train", interrupted)
    monkeypatch.setattr(runner, "evaluate", refuse)
    with pytest.raises(SystemExit) as ending:
        reproduce("table2", tmp_path / "out", "--rows", FIXED, DENSE)
    assert ending.value.code == 143
    (row,) = read_results(tmp_path / "out" / "table2.json").rows
    assert (row.name, row.done, row.steps, row.scores) == (DENSE, 0, 2, [])
    assert f"to go on: longstride reproduce table2 --out {tmp_path / 'out'} --rows" in capsys.readouterr().out


def test_a_signal_during_the_last_step_of_a_row_ends_the_experiment(tmp_path, monkeypatch, capsys):
    take_step, out = Trainer.take_step, tmp_path / "out"

    def interrupted(self, tokens):
        if self.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return take_step(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", interrupted)
        with pytest.raises(SystemExit) as ending:
            reproduce("table2", out, "--rows", FIXED, DENSE)
    assert ending.value.code == 143
    assert "to go on: longstride reproduce table2" in capsys.readouterr().out
    (row,) = read_results(out / "table2.json").rows
    assert (row.name, row.steps, row.done, row.scores) == (DENSE, 4, 0, [])
    (row,) = reproduce("table2", out, "--rows", DENSE).rows
    assert (row.steps, row.done, len(row.scores)) == (4, 1, 1)


def test_a_row_that_is_interrupted_before_its_first_line_of_metrics_can_go_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def interrupted(config, *_, **__):
        return replace(train(replace(config, log_every=9, validate_every=9), until=1), signal=2)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "train", interrupted)
        with pytest.raises(SystemExit) as ending:
            reproduce("table2", out, "--rows", FIXED)
    assert ending.value.code == 130
    assert "to go on: longstride reproduce table2" in capsys.readouterr().out
    assert not (out / f"{FIXED}-seed-0/metrics.jsonl").exists()
    (row,) = reproduce("table2", out, "--rows", FIXED).rows
    assert (row.steps, row.done) == (4, 1)


def test_an_interrupted_probe_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "train", lambda config, **given: replace(train(config, **given), signal=15))
    with pytest.raises(SystemExit) as ending:
        reproduce("contest", tmp_path / "out", "--rows", "dense-1024", "--seconds", "1.7")
    assert ending.value.code == 143
    assert f"to go on: longstride reproduce contest --out {tmp_path / 'out'} --rows" in capsys.readouterr().out
    assert not (tmp_path / "out" / "dense-1024-seed-0").exists()


def test_steps_follow_from_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "step_seconds", lambda lines: 0.5)
    out = tmp_path / "out"
    (row,) = reproduce("contest", out, "--rows", "dense-1024", "--seconds", "1.7").rows
    assert (row.steps, row.step_seconds, row.seconds) == (3, 0.5, 1.5)
    assert [score.min_context for score in row.scores] == [0, 32]
    (out / "contest.json").unlink()  # A run that exists keeps its steps.
    monkeypatch.setattr(runner, "probe", refuse)
    assert reproduce("contest", out, "--rows", "dense-1024", "--seconds", "1.7").rows[0].steps == 3


def test_the_time_of_a_step_is_without_the_first_line():
    lines = [{"step": step, "seconds_per_step": seconds} for step, seconds in ((1, 9.0), (2, 1.0), (3, 3.0), (4, 2.0))]
    assert runner.step_seconds(lines) == 2.0
    assert runner.step_seconds(lines[:1]) == 9.0
    assert runner.step_seconds([]) is None


def test_another_row_goes_on_after_one_that_diverges(done, monkeypatch):
    (done / "table2.json").unlink()

    def diverge(config, *given, **named):
        if "dense" in config.out:
            raise FloatingPointError("not finite")
        return train(config, *given, **named)

    monkeypatch.setattr(runner, "train", diverge)
    dense, fixed = reproduce("table2", done, "--rows", DENSE, FIXED).rows
    assert (dense.done, dense.failure) == (0, "FloatingPointError: not finite")
    assert (fixed.done, fixed.failure) == (1, None)


def test_memory_is_free_between_rows(tmp_path, monkeypatch):
    models, alive = [], []

    def watched(config, *given, **named):
        alive.append(sum(model() is not None for model in models))
        return train(config, *given, **named)

    begin = loop.Trainer._begin

    def watch(self, *given):
        begin(self, *given)
        models.append(weakref.ref(self.model))
        self.itself = self  # Freed by the garbage collector alone.

    monkeypatch.setattr(loop.Trainer, "_begin", watch)
    monkeypatch.setattr(runner, "train", watched)
    gc.disable()  # Nothing is freed by chance.
    try:
        reproduce("table2", tmp_path / "out", "--rows", DENSE, FIXED, "--steps", "1")
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_memory_is_freed_on_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("memory"))
    runner.release_memory(torch.device("cpu"))
    assert calls == []
    runner.release_memory(torch.device("cuda"))
    assert calls == ["memory"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rows", FIXED, "--steps", "5"], "has enwik8-dense, seed 0, with --steps 4, and now it is 5; give the same, or"),
        (["--rows", FIXED, "--seeds", "1", "--seconds", "2"], "with --seconds left out, and now it is 2.0; give the same"),
        (["--rows", "enwik8-strided", "--data", "BOOK"], "has enwik8-dense, seed 0, with other --data; give the same, or"),
        (["--rows", IMAGES, "--data", "BOOK"], "--data has no images, which cifar10-strided need"),
        (["--rows", IMAGES, "--data", "IMAGES"], "the model is for images of 32 x 32 x 3; table2 is for CIFAR-10, which lo"),
        (["--data", "BOOK", "BOOK"], "both text; give one of them"),
    ],
)
def test_what_does_not_fit_is_refused(done, tmp_path, words, says, capsys):
    book = tmp_path / "book.txt"
    book.write_bytes(samples.text()[:40_000])
    images = samples.patches()[:2, :8, :8]
    write_store(tmp_path / "images", "images", {"train": images, "valid": images}, item=(8, 8, 3))
    paths = {"BOOK": str(book), "IMAGES": str(tmp_path / "images")}
    with pytest.raises(SystemExit) as ending:
        reproduce("table2", done, *(paths.get(word, word) for word in words))
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


def test_results_of_earlier_versions_are_gone_on_with(done, monkeypatch, capsys):
    """They have no hashes of the data, and None for the steps of the scale."""
    path = done / "table2.json"
    content = json.loads(path.read_text())
    for row in content["rows"]:
        del row["settings"]["data"]
        row["settings"]["steps"] = None
    path.write_text(json.dumps(content))
    monkeypatch.setattr(runner, "train", refuse)
    reproduce("table2", done, "--rows", DENSE, FIXED, IMAGES)
    assert capsys.readouterr().out.count(" is done") == 3
    with pytest.raises(SystemExit):
        reproduce("table2", done, "--rows", DENSE, "--steps", "9")
    assert "with --steps 4, and now it is 9" in capsys.readouterr().err


def test_results_of_another_experiment_are_not_mixed_in(done, monkeypatch, capsys):
    before = (done / "table2.json").read_text()
    (done / "contest.json").write_text(before)
    monkeypatch.setattr(runner, "train", refuse)
    with pytest.raises(SystemExit) as ending:
        reproduce("contest", done, "--rows", "text-modern")
    assert ending.value.code == 2
    assert f"{done / 'contest.json'} has table2, and contest is asked for" in capsys.readouterr().err
    assert (done / "contest.json").read_text() == before


def test_rows_without_data_are_left_out(tmp_path, monkeypatch, capsys):
    book = tmp_path / "book.txt"
    book.write_bytes(samples.text()[:40_000])
    monkeypatch.setattr(runner.RowRunner, "run", lambda self: None)
    main(["reproduce", "table2", "--scale", "tiny", "--out", str(tmp_path / "out"), "--data", str(book)])
    assert (
        "left out, as --data has nothing for them: cifar10-dense, cifar10-fixed, cifar10-strided" in capsys.readouterr().out
    )
