"""Steps captured as CUDA graphs, beside plain ones."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from longstride.model import SparseTransformer
from longstride.training import capture, train
from longstride.training.averaging import average_gradients
from longstride.training.metrics import read_metrics
from longstride.training.trainer import Trainer
from tests.training.small import config, same, step, store, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = {"width": 128, "heads": 2, "context": 512, "pattern": "merged(fixed(128, 32))", "embedding": "matrix(128)"}
CHANGES = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon"}},
    "average of accumulated parts": {"ema": 0.9, "accumulate": 2},
    "recomputed": {"model": {"recompute": "on"}},
    "recomputed without attention": {"model": {"recompute": "selective"}},
    "inputs in host memory": {"model": {"recompute": "host"}},
    "one input in host memory": {"model": {"recompute": "host + again"}},
    "float16": {"model": {"precision": "float16"}},
    "float32": {"model": {"precision": "float32"}},
    "compiled": {"compile": True},
    "compiled and recomputed": {"compile": True, "model": {"recompute": "on"}},
}


def settings(folder, **changes):
    model = {"precision": "bfloat16", "dropout": 0.3, **MODEL, **changes.pop("model", {})}
    given = {"device": "cuda", "log_every": 1, "steps": 24, "validate_every": 10, "save_every": 7}
    return config(folder, **{**given, **changes, "model": model})


def losses(run):
    names = ("step", "loss", "gradient_norm", "valid_bits_per_byte", "skipped", "loss_scale")
    return [[row.get(name) for name in names] for row in read_metrics(run)]


def batch(made, number):
    return torch.from_numpy(made.training.batch(0, number, 4)).cuda()


@pytest.mark.parametrize("name", CHANGES)
def test_captured_and_plain_runs_are_the_same(name, tmp_path):
    """Bit for bit, with dropout, validations and checkpoints, and also if a captured run is stopped and resumed."""
    data = store(tmp_path / "data")
    runs = {how: settings(tmp_path / how, data=data, capture=how, **CHANGES[name]) for how in ("off", "on")}
    for made in runs.values():
        train(made)
    assert losses(tmp_path / "on/run") == losses(tmp_path / "off/run")
    assert same(weights(tmp_path / "on/run"), weights(tmp_path / "off/run"))
    parts = settings(tmp_path / "parts", data=data, capture="on", **CHANGES[name])
    train(parts, until=9)
    train(replace(parts, capture="off"), resume=True, until=15)
    train(parts, resume=True)
    assert losses(tmp_path / "on/run") == losses(tmp_path / "parts/run")
    assert same(weights(tmp_path / "on/run"), weights(tmp_path / "parts/run"))


def test_losses_of_200_steps_are_the_same(tmp_path):
    data = store(tmp_path / "data")
    for how in ("on", "off"):
        changes = {"steps": 200, "validate_every": 100, "save_every": 200, "optimizer": {"name": "muon"}}
        train(settings(tmp_path / how, data=data, capture=how, **changes))
    assert losses(tmp_path / "on/run") == losses(tmp_path / "off/run")


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_every_replay_has_its_own_dropout(recompute, tmp_path):
    changes = {"capture": "on", "model": {"recompute": recompute}, "optimizer": {"learning_rate": 0.0, "decay": 0.0}}
    with closing(Trainer(settings(tmp_path, **changes), False)) as made:
        torch.nn.init.normal_(made.model.output.weight)
        for _ in range(8):
            step(made, batch(made, 0))
        assert isinstance(made.compute, capture.CapturedStep)
        assert made.compute.graph is not None
        assert len(set(made.run_state.losses)) == 8


@pytest.fixture
def factor(monkeypatch):
    """A number on the device that every loss is multiplied by."""
    factor, loss = torch.ones((), device="cuda"), SparseTransformer.loss
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) * factor)
    return factor


def state(made):
    found = {name: x.clone() for name, x in made.model.state_dict().items()}
    names = {x: name for name, x in made.model.named_parameters()}
    for optimizer in made.optimizers:
        found |= {f"{names[x]} {key}": y.clone() for x, fields in optimizer.state.items() for key, y in fields.items()}
    return found


@pytest.mark.parametrize("how", ["on", "off"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(how, name, factor, tmp_path):
    with closing(Trainer(settings(tmp_path, capture=how, optimizer={"name": name}), False)) as made:
        for number in range(5):
            step(made, batch(made, number))
        before = state(made)
        factor.fill_(float("nan"))
        made.take_step(batch(made, 5))
        factor.fill_(1)
        with pytest.raises(FloatingPointError, match="step 6 has a loss of nan"):
            made.take_step(batch(made, 6))
        assert made.step == 5
        assert same(before, state(made))
        step(made, batch(made, 5))
        assert not same(before, state(made))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_overflow_in_float16_is_skipped_inside_the_graph(name, factor, tmp_path):
    changes = {"capture": "on", "model": {"precision": "float16"}, "optimizer": {"name": name}}
    with closing(Trainer(settings(tmp_path, **changes), False)) as made:
        for number in range(5):
            assert step(made, batch(made, number))["skipped"] == 0
        before, scale = state(made), made.updates.scale
        factor.fill_(float("inf"))
        found = step(made, batch(made, 5))
        assert (found["skipped"], found["loss_scale"], made.step) == (1, scale / 2, 6)
        assert same(before, state(made))
        factor.fill_(1)
        assert step(made, batch(made, 6))["skipped"] == 0
        assert not same(before, state(made))


def test_a_capture_that_fails_leaves_the_plain_path(tmp_path, monkeypatch):
    loss, data = SparseTransformer.loss, store(tmp_path / "data")
    train(settings(tmp_path / "off", data=data, capture="off"))

    def waits(self, tokens):
        result = loss(self, tokens)
        if torch.cuda.is_current_stream_capturing():
            result.item()
        return result

    monkeypatch.setattr(SparseTransformer, "loss", waits)
    train(settings(tmp_path / "auto", data=data))
    assert losses(tmp_path / "auto/run") == losses(tmp_path / "off/run")
    with pytest.raises(RuntimeError, match=r"^train: --capture on: the step cannot be captured: "):
        train(settings(tmp_path / "on", data=data, capture="on"))


@pytest.mark.parametrize("how", ["on", "off"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_host_does_not_wait_in_a_step(how, name, tmp_path):
    """But for the values of the step before."""
    changes = {"capture": how, "optimizer": {"name": name}, "ema": 0.9, "model": {"recompute": "on", "precision": "float16"}}
    with closing(Trainer(settings(tmp_path, **changes), False)) as made:
        tokens = batch(made, 0)
        for _ in range(4):
            made.take_step(tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                made.take_step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_nccl_averages_gradients_inside_a_graph():
    """In a group of one process, whose mean is what each gradient is, rounded to bfloat16."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    weights = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((300, 70), (7,), ())]
    for x in weights:
        x.grad = torch.empty_like(x)

    def average():
        average_gradients(weights, 1, torch.bfloat16)
        return weights[0].grad

    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            average()  # The first collective makes the communicator, which a capture does not allow.
        graph = capture.record(average, stream)
        for _ in range(2):
            given = [torch.randn_like(x) for x in weights]
            torch._foreach_copy_([x.grad for x in weights], given)
            graph.replay()
            assert all(torch.equal(x.grad, y.bfloat16().float()) for x, y in zip(weights, given))
        del graph  # Before its group.
    finally:
        dist.destroy_process_group()
