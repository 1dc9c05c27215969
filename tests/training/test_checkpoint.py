import json
import os

import pytest
import torch

from longstride.model import SparseTransformer
from longstride.training import OptimizerConfig, checkpoint
from longstride.training.optimizer import make_optimizers
from tests.training.small import MODEL

FILES = ["model.safetensors", "state.json", "state.safetensors"]


def made(name="adamw", seed=0, steps=0):
    torch.manual_seed(seed)
    model = SparseTransformer(MODEL)
    optimizers = make_optimizers(model, OptimizerConfig(name, learning_rate=0.01))
    average = {name: torch.randn_like(x) for name, x in model.named_parameters()}
    walk(model, optimizers, steps)
    return model, optimizers, average


def walk(model, optimizers, steps):
    for _ in range(steps):
        for x in model.parameters():
            x.grad = torch.randn_like(x)
        for one in optimizers:
            one.step()


def save(folder, step, given=None, keep=9, **progress):
    return checkpoint.save(folder, step, *(given or made()), progress, keep)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def states(optimizers):
    return [one.state_dict()["state"] for one in optimizers]


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_round_trip_has_the_same_bits(name, tmp_path):
    saved = made(name, steps=3)
    folder = save(tmp_path, 3, saved, best=0.1, scaler={"scale": 3.0})
    assert names(folder) == FILES
    other = made(name, seed=1, steps=1)
    found = checkpoint.load(folder, *other)
    assert (found["step"], found["best"], found["scaler"]) == (3, 0.1, {"scale": 3.0})
    for one, two in ((saved[0].state_dict(), other[0].state_dict()), (saved[2], other[2])):
        assert all(torch.equal(x, two[key]) and x.dtype == two[key].dtype for key, x in one.items())
    for one, two in zip(states(saved[1]), states(other[1])):
        assert one
        assert one.keys() == two.keys()
        for number, fields in one.items():
            assert fields.keys() == two[number].keys()
            for key, value in fields.items():
                there = two[number][key]
                assert type(value) is type(there)
                if isinstance(value, torch.Tensor):
                    assert value.dtype == there.dtype
                    assert torch.equal(value, there)
                else:
                    assert value == there
    for each in (saved, other):
        torch.manual_seed(2)
        walk(*each[:2], 2)
    assert all(torch.equal(x, other[0].state_dict()[key]) for key, x in saved[0].state_dict().items())


def test_state_keeps_its_own_dtype(tmp_path):
    """PyTorch would cast it to the weights'."""
    saved, other = made(steps=1), made(seed=1)
    first = next(iter(saved[1][0].state.values()))
    first["exp_avg"] = first["exp_avg"].double() / 3
    checkpoint.load(save(tmp_path, 1, saved), *other)
    found = next(iter(other[1][0].state.values()))["exp_avg"]
    assert found.dtype == torch.float64
    assert torch.equal(found, first["exp_avg"])


def test_before_the_first_step(tmp_path):
    other = made(seed=1)
    assert checkpoint.load(save(tmp_path, 0), *other)["step"] == 0
    assert states(other[1]) == [{}]


def test_no_average(tmp_path):
    model, optimizers, _ = made(steps=1)
    folder = save(tmp_path, 1, (model, optimizers, {}))
    checkpoint.load(folder, *made(seed=1)[:2], {})
    with pytest.raises(ValueError, match=r"step-1 is not of this run's model and optimizer: .*average"):
        checkpoint.load(folder, *made(seed=1))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_cut_short_is_refused(file, share, tmp_path):
    folder = save(tmp_path, 12, made(steps=1))
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(share * len(content))])
    other = made(seed=1)
    before = {name: x.clone() for name, x in other[0].state_dict().items()}
    with pytest.raises(ValueError, match=r"step-12 cannot be read: .*; remove that folder to resume from the one before"):
        checkpoint.load(folder, *other)
    assert all(torch.equal(x, before[name]) for name, x in other[0].state_dict().items())


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_refused(file, tmp_path):
    folder = save(tmp_path, 12)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=r"step-12 cannot be read: .*"):
        checkpoint.load(folder, *made())


def test_bytes_that_are_no_text(tmp_path):
    folder = save(tmp_path, 12)
    (folder / "state.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"step-12 cannot be read"):
        checkpoint.load(folder, *made())


def test_another_version_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**content, "version": 9}))
    with pytest.raises(ValueError, match="version 9 of checkpoints is not known, only 1 is"):
        checkpoint.load(folder, *made())


def test_another_optimizer_is_refused(tmp_path):
    folder = save(tmp_path, 1, made("adamw", steps=1))
    with pytest.raises(ValueError, match="step-1 is not of this run's model and optimizer"):
        checkpoint.load(folder, *made("muon"))


def test_keep_the_newest_by_number(tmp_path):
    for step in (8, 9, 10):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-10", "step-9"]
    assert checkpoint.newest(tmp_path) == tmp_path / "step-10"
    save(tmp_path, 100, keep=1)
    assert names(tmp_path) == ["step-100"]


def test_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, best=1)
    folder = save(tmp_path, 5, best=2)
    assert names(tmp_path) == ["step-5"]
    assert checkpoint.load(folder, *made())["best"] == 2


def test_newest_of_none(tmp_path):
    assert checkpoint.newest(tmp_path / "missing") is None
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-3").write_text("a file")
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_interrupted_save_leaves_the_last_one(error, count, tmp_path, monkeypatch):
    """In its first file, its second, and just before the folder gets its name."""
    save(tmp_path, 5, keep=1)
    calls = []

    def fails_at_last(real):
        def call(*arguments):
            calls.append(arguments)
            if len(calls) == count:
                raise error
            return real(*arguments)

        return call

    monkeypatch.setattr(checkpoint, "save_file", fails_at_last(checkpoint.save_file))
    monkeypatch.setattr(os, "replace", fails_at_last(os.replace))
    with pytest.raises(type(error)):
        save(tmp_path, 6, keep=1)
    assert len(calls) == count
    monkeypatch.undo()
    assert names(tmp_path) == ["step-5"]
    assert checkpoint.load(tmp_path / "step-5", *made())["step"] == 5


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / ".step-4.999999"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-5"]
