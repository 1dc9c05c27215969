"""Captured steps, with a graph that stands in for CUDA's: recording runs nothing, a replay uses the same tensors."""

import signal
from contextlib import closing

import pytest
import torch

from longstride.model import SparseTransformer
from longstride.training import capture, train
from longstride.training.metrics import read_metrics
from longstride.training.ranks import Ranks
from longstride.training.trainer import Trainer
from tests.training.small import config, same, step, store, weights
from tests.training.stand_in_graph import on_device, stand_in_graphs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
COMPUTED = ("loss", "gradient_norm", "valid_bits_per_byte", "learning_rate", "skipped", "loss_scale")


@pytest.fixture(name="on_device")
def on_device_fixture():
    with on_device():
        yield


@pytest.fixture
def graphs():
    with stand_in_graphs() as made:
        yield made


def metrics(run):
    return [{name: row.get(name) for name in ("step", *COMPUTED)} for row in read_metrics(run)]


@pytest.mark.parametrize(
    "changes",
    [
        {"ema": 0.9, "accumulate": 2},
        {"optimizer": {"name": "muon"}, "log_every": 1},
        {"model": {"precision": "float16", "recompute": "on"}},
        {"model": {"recompute": "host + again"}},
    ],
    ids=str,
)
def test_captured_and_plain_runs_are_the_same(changes, graphs, tmp_path):
    """With dropout, through validations and checkpoints; the captured one also if it is stopped and resumed twice."""
    data = store(tmp_path / "data")
    whole, plain, parts = (
        config(tmp_path / name, data=data, capture=how, **changes)
        for name, how in (("whole", "on"), ("plain", "off"), ("parts", "on"))
    )
    train(whole)
    assert [len(replays) for replays in graphs] == [12 - capture.PLAIN_STEPS]
    train(plain)
    assert len(graphs) == 1
    train(parts, until=4)
    train(parts, resume=True, until=5)
    train(parts, resume=True)
    assert [len(replays) for replays in graphs] == [10, 2, 5]
    for name in ("plain", "parts"):
        assert same(weights(tmp_path / "whole/run"), weights(tmp_path / name / "run"))
        assert metrics(tmp_path / "whole/run") == metrics(tmp_path / name / "run")


def test_every_replay_has_its_own_dropout(graphs, tmp_path):
    with closing(Trainer(config(tmp_path, capture="on", optimizer={"learning_rate": 0.0, "decay": 0.0}), False)) as made:
        torch.nn.init.normal_(made.model.output.weight)
        tokens = torch.from_numpy(made.training.batch(0, 0, 4))
        for _ in range(6):
            step(made, tokens)
        assert len(set(made.run_state.losses)) == 6


def test_a_captured_step_reads_its_batch(graphs, tmp_path):
    changes = {"capture": "on", "model": {"dropout": 0.0}, "optimizer": {"learning_rate": 0.0, "decay": 0.0}}
    with closing(Trainer(config(tmp_path, **changes), False)) as made:
        torch.nn.init.normal_(made.model.output.weight)
        for number in (0, 1, 2, 3, 4, 3):
            step(made, torch.from_numpy(made.training.batch(0, number, 4)))
        losses = made.run_state.losses
        assert len(set(losses)) == 5
        assert losses[3] == losses[5]


def poison(monkeypatch, at, value):
    """Multiplies the loss of these calls of the model by a value that is not finite."""
    loss, calls = SparseTransformer.loss, []

    def poisoned(self, tokens):
        calls.append(len(calls) + 1)
        return loss(self, tokens) * (value if calls[-1] in at else 1)

    monkeypatch.setattr(SparseTransformer, "loss", poisoned)


def whole_state(made):
    found = {name: x.clone() for name, x in made.model.state_dict().items()}
    found |= {f"average {name}": x.clone() for name, x in made.average.items()}
    names = {x: name for name, x in made.model.named_parameters()}
    for one in made.optimizers:
        found |= {f"{names[x]} {key}": y.clone() for x, fields in one.state.items() for key, y in fields.items()}
    return found


@pytest.mark.parametrize("how", ["on", "off"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(how, name, graphs, tmp_path, monkeypatch):
    """Nor does the one that was started before its values were read."""
    made = Trainer(config(tmp_path, capture=how, ema=0.5, optimizer={"name": name}), False)
    batches = [torch.from_numpy(made.training.batch(0, number, 4)) for number in range(6)]
    poison(monkeypatch, [5], float("nan"))
    with closing(made):
        for tokens in batches[:4]:
            made.take_step(tokens)
        made.finish_steps()
        before = whole_state(made)
        made.take_step(batches[4])
        assert same(before, whole_state(made))
        with pytest.raises(
            FloatingPointError, match="step 5 has a loss of nan and a gradient of norm nan; the weights are as"
        ):
            made.take_step(batches[5])
        assert made.step == 4
        assert len(made.run_state.losses) == 4
        assert same(before, whole_state(made))
        step(made, batches[5])  # It can go on.
        assert made.step == 5
        assert not same(before, whole_state(made))


@pytest.mark.parametrize("how", ["on", "off"])
def test_an_overflow_in_float16_is_skipped(how, graphs, tmp_path, monkeypatch):
    changes = {"capture": how, "model": {"precision": "float16"}, "optimizer": {"name": "muon"}, "log_every": 1, "steps": 8}
    poison(monkeypatch, [2, 4, 5], float("inf"))  # A plain step, and captured ones.
    train(config(tmp_path, **changes))
    rows = read_metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [0, 1, 0, 1, 1, 0, 0, 0]
    assert [row["loss_scale"] for row in rows] == [2.0**power for power in (16, 15, 15, 14, 13, 13, 13, 13)]
    assert [row["loss"] is None for row in rows] == [False, True, False, True, True, False, False, False]


def test_a_line_of_metrics_counts_the_skipped_steps_of_its_interval(graphs, tmp_path, monkeypatch):
    """Also if the run was stopped in between."""
    made = config(tmp_path, model={"precision": "float16"}, log_every=4, validate_every=12, save_every=100)
    poison(monkeypatch, [2, 3, 7, 12], float("inf"))
    train(made, until=3)
    train(made, resume=True)
    assert [row["skipped"] for row in read_metrics(tmp_path / "run")] == [2, 1, 1]


def test_a_run_that_is_not_finite_saves_the_step_before(graphs, tmp_path, monkeypatch):
    data = store(tmp_path / "data")
    poison(monkeypatch, [6], float("nan"))
    broken = config(tmp_path / "broken", data=data, capture="on", save_every=100, validate_every=100, log_every=100)
    with pytest.raises(FloatingPointError, match="step 6 has a loss of nan"):
        train(broken)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "broken/run/checkpoints").iterdir()] == ["step-5"]


@pytest.mark.parametrize("how", ["on", "off"])
def test_values_are_read_a_step_later(how, graphs, tmp_path):
    with closing(Trainer(config(tmp_path, capture=how), False)) as made:
        tokens = torch.from_numpy(made.training.batch(0, 0, 4))
        for number in range(1, 6):
            made.take_step(tokens)
            assert (made.step, [values.step for values in made.unread]) == (number, [number])
            assert len(made.run_state.losses) == number - 1
        made.save()  # A checkpoint has the losses of all steps.
        assert made.unread == []
        assert len(made.run_state.losses) == 5


@pytest.mark.parametrize("how", ["on", "off"])
def test_an_interruption_loses_no_loss(how, graphs, tmp_path, monkeypatch):
    """The line of metrics after it has the mean of all steps since the line before."""
    take_step, data = Trainer.take_step, store(tmp_path / "data")

    def interrupted(self, tokens):
        if self.step == 4:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, tokens)

    cut = config(tmp_path / "cut", data=data, capture=how, log_every=6)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", interrupted)
        assert train(cut).step == 5
    train(cut, resume=True)
    train(config(tmp_path / "whole", data=data, capture=how, log_every=6))
    assert metrics(tmp_path / "cut/run") == metrics(tmp_path / "whole/run")
    assert same(weights(tmp_path / "cut/run"), weights(tmp_path / "whole/run"))


def test_a_capture_that_fails_leaves_the_plain_path(graphs, tmp_path, monkeypatch):
    def refuse(work, stream):
        raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    data = store(tmp_path / "data")
    train(config(tmp_path / "plain", data=data, capture="off"))
    said = []
    monkeypatch.setattr(capture, "record", refuse)
    with closing(Trainer(config(tmp_path / "made", data=data), False, say=said.append)) as made:
        for number in range(12):
            made.take_step(torch.from_numpy(made.training.batch(0, number, 4)))
        made.save()
        made.checkpoints.wait()
    assert said == ["steps run without a CUDA graph, as the capture failed: operation not permitted"]
    assert same(weights(tmp_path / "plain/run"), weights(tmp_path / "made/run"))
    with pytest.raises(RuntimeError, match=r"^train: --capture on: the step cannot be captured: operation not permitted$"):
        train(config(tmp_path / "on", data=data, capture="on"))


def test_what_stands_in_the_way(tmp_path):
    made = config(tmp_path)
    assert capture.obstacle(made, GPU, Ranks()) is None
    assert "the device is cpu" in capture.obstacle(made, CPU, Ranks())
    assert capture.obstacle(made, GPU, Ranks(count=2)) is None
    assert "fsdp gathers" in capture.obstacle(config(tmp_path / "fsdp", parallel="fsdp"), GPU, Ranks(count=2))
    assert capture.obstacle(config(tmp_path / "alone", parallel="fsdp"), GPU, Ranks()) is None
    adafactor = config(tmp_path / "other", optimizer={"name": "adafactor"})
    assert "Adafactor" in capture.obstacle(adafactor, GPU, Ranks())
    for how, reason in (("auto", None), ("on", None), ("off", "--capture off")):
        assert capture.choose(config(tmp_path / how, capture=how), GPU, Ranks()) == reason
    assert "2 processes" in capture.choose(made, GPU, Ranks(count=2))
    assert capture.choose(config(tmp_path / "two", capture="on"), GPU, Ranks(count=2)) is None
    for how, recompute, captured in (("auto", "parts", False), ("on", "parts", True), ("auto", "host + on", True)):
        parts = config(tmp_path / f"{how} {recompute}", capture=how, model={"layers": 2, "recompute": recompute})
        assert (capture.choose(parts, GPU, Ranks()) is None) == captured
    with pytest.raises(ValueError, match=r"^train: --capture on is not possible: .* the device is cpu; use --capture auto"):
        train(config(tmp_path / "refused", capture="on", device="cpu"))
    assert not (tmp_path / "refused/run").exists()
    with pytest.raises(ValueError, match="capture must be"):
        config(tmp_path / "wrong", capture="yes")


def test_adam_is_capturable_only_while_it_is_captured():
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([weight], fused=True)
    with capture._capturable([adam]):
        assert adam.param_groups[0]["capturable"]
    assert not adam.param_groups[0]["capturable"]
