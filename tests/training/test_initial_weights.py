"""A finished run that goes on, and a run that begins with the weights of another."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from longstride.model import SparseTransformer
from longstride.training import train
from longstride.training.metrics import read_metrics
from longstride.training.optimizer import learning_rate
from longstride.training.trainer import Trainer
from tests.training.small import config, same, store, weights


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """They take longer than the steps."""
    monkeypatch.setattr(Trainer, "finish", lambda *_: None)


def said(made, resume=False):
    file = io.StringIO()
    ended = train(made, resume, console=Console(file=file, width=1000))
    return ended, file.getvalue()


def test_a_finished_run_is_extended(tmp_path):
    made = config(tmp_path, steps=6, log_every=1)
    train(made)
    more = replace(made, steps=12)
    ended, lines = said(more, resume=True)
    assert (ended.step, ended.done, ended.reason) == (12, True, "all steps are done")
    rates = [learning_rate(made.optimizer, step, 6 if step < 6 else 12) for step in range(12)]
    assert [row["learning_rate"] for row in read_metrics(made.out)] == pytest.approx(rates, rel=1e-12)
    assert rates[6] > rates[5]
    expected = (
        f"run is extended from 6 to 12 steps; from step 7 on it has the learning rates of a run of 12 steps: "
        f"{rates[6]:.3g} now, {rates[5]:.3g} before\n"
    )
    assert expected in lines
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 12
    ended, lines = said(more, resume=True)  # As any finished run.
    assert (ended.step, "is extended" in lines) == (12, False)


def test_an_extension_that_pauses_goes_on_with_the_same_bits(tmp_path):
    data = store(tmp_path / "data")
    whole, cut = (config(tmp_path / name, data=data, steps=6) for name in ("whole", "cut"))
    for made in (whole, cut):
        train(made)
    train(replace(whole, steps=12), resume=True)
    train(replace(cut, steps=12), resume=True, until=8)
    ended, lines = said(replace(cut, steps=12), resume=True)
    assert (ended.step, "is extended" in lines) == (12, False)
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "cut/run"))


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("place", ["run", "checkpoint", "model"])
def test_a_run_begins_with_weights(place, ema, tmp_path, monkeypatch):
    first = config(tmp_path / "first", steps=5, validate_every=5)
    train(first)
    source = {"run": "run", "checkpoint": "run/checkpoints/step-5", "model": "saved"}[place]
    SparseTransformer.from_pretrained(first.out).save_pretrained(tmp_path / "first/saved")
    monkeypatch.chdir(tmp_path / "first")
    made = replace(config(tmp_path / "next", data=first.data, steps=3, ema=ema), init_from=source)
    trainer = Trainer(made, False)
    try:
        began = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        assert same(began, load_file(tmp_path / "first" / source / "model.safetensors"))
        assert not ema or same(trainer.average, dict(trainer.model.named_parameters()))
    finally:
        trainer.close()
    path = str(tmp_path / "first" / source)
    assert json.loads((tmp_path / "next/run/config.json").read_text())["init_from"] == path
    record = json.loads((tmp_path / "next/run/run.json").read_text())["init_from"]
    assert (record["path"], len(record["sha256"])) == (path, 64)
    ended, lines = said(made, resume="auto")  # It never came to a checkpoint, and begins anew with the same weights.
    assert ended.step == 3
    assert f"begins from the weights of {path}" in lines
    ended, lines = said(replace(made, steps=4), resume=True)
    assert (ended.step, "begins from" in lines) == (4, False)


def test_weights_that_changed_since_a_run_began(tmp_path):
    first = config(tmp_path / "first", steps=2, validate_every=2)
    train(first)
    made = replace(config(tmp_path / "next", data=first.data, steps=3), init_from=first.out)
    Trainer(made, False).close()
    model = SparseTransformer.from_pretrained(first.out)
    torch.nn.init.ones_(model.output.weight)
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "first/run/model.safetensors").write_bytes((tmp_path / "other/model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"train: init_from = '.*' has other weights than .*next/run began with"):
        train(made, resume="auto")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 3}, "has no blocks.2.norm_attention.weight, which this model has of shape [32]; its model has "
         "--model.layers 2"),
        ({"layers": 1}, "has 'blocks.1.attention.project.bias', and this model has no such weight; its model has "
         "--model.layers 2"),
        ({"width": 16, "embedding": "matrix(16)"}, "has embedding.start of shape [32], and this model of [16]; its model "
         "has --model.width 32 --model.embedding 'matrix(8)'"),
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_another_shape_are_named(changes, says, tmp_path):
    first = config(tmp_path / "first", steps=2, validate_every=2)
    train(first)
    made = replace(config(tmp_path / "next", data=first.data, model=changes), init_from=first.out)
    with pytest.raises(ValueError, match=r"^train: init_from = '.*first/run' ") as caught:
        train(made)
    assert f"{says}; --config {first.out} without --model flags takes the whole model" in str(caught.value)
    assert not (tmp_path / "next/run").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    made = config(tmp_path)
    model = SparseTransformer(made.model)
    torch.nn.init.constant_(model.blocks[1].ff.outer.bias, float("nan"))
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved/model\.safetensors: 'blocks\.1\.ff\.outer\.bias' has a value of nan; "):
        train(replace(made, init_from=str(tmp_path / "saved")))
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^train: init_from: .*nowhere is no run and no saved model"):
        train(replace(config(tmp_path), init_from=str(tmp_path / "nowhere")))
    assert not (tmp_path / "run").exists()
