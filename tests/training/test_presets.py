import json
import re
from dataclasses import replace

import pytest

from longstride.data.kinds import all_kinds
from longstride.model import preset
from longstride.model.presets import PRESETS
from longstride.model.recipes import RECIPES
from longstride.training import OptimizerConfig, train, train_preset
from longstride.training.presets import MODERN, SETTINGS
from tests.training.small import config, same, store, weights


def test_every_model_has_its_training():
    assert SETTINGS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", [*PRESETS, "text-small-dense"])
def test_presets_are_whole(name):
    made = train_preset(name)
    assert made.model == preset(name)
    assert made.steps >= 1000


def test_epochs_are_the_papers():
    cifar, enwik8, imagenet = (train_preset(name) for name in ("cifar10", "enwik8", "imagenet64"))
    assert cifar.steps * cifar.batch / 48_000 == pytest.approx(120, rel=0.02)
    assert enwik8.steps * enwik8.batch * enwik8.model.context / 90e6 == pytest.approx(80, rel=0.02)
    assert imagenet.steps * imagenet.batch / 1_281_167 == pytest.approx(70, rel=0.02)


def test_changes():
    made = train_preset("text-small", steps=3, seed=4)
    assert (made.steps, made.seed, made.batch) == (3, 4, SETTINGS["text-small"]["batch"])
    with pytest.raises(ValueError, match="steps must be at least 1"):
        train_preset("text-small", steps=0)


def test_nested_changes():
    made = train_preset("text-small", model={"layers": 2}, optimizer={"learning_rate": 0.01}, steps=3)
    assert made.model == replace(preset("text-small"), layers=2)
    assert made.optimizer == replace(SETTINGS["text-small"]["optimizer"], learning_rate=0.01)
    assert made.steps == 3
    assert train_preset("text-small", model=preset("audio-small")).model == preset("audio-small")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": 3}, "train_preset: there is no field 'step'; did you mean 'steps'?"),
        ({"model": {"layer": 2}}, "train_preset: model: there is no field 'layer'; did you mean 'layers'?"),
        (
            {"optimizer": {"learning-rate": 1}},
            "train_preset: optimizer: there is no field 'learning-rate'; did you mean 'learning_rate'?",
        ),
        ({"model": {"layers": 0}}, "config: layers must be at least 1, got 0"),
        ({"model": 3}, "train: model must be a ModelConfig, got 3"),
    ],
    ids=str,
)
def test_changes_that_are_refused(changes, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        train_preset("text-small", **changes)


def test_every_preset_is_for_some_data():
    made_for = {kind.name: kind.presets for kind in all_kinds()}
    assert {name for names in made_for.values() for name in names} == PRESETS.keys()
    for name in PRESETS:
        assert (name in made_for["images"]) == preset(name).embedding.startswith("image(")


def test_recipes():
    made = train_preset("enwik8", recipe="modern", steps=3)
    assert made.model == preset("enwik8", recipe="modern")
    assert (made.optimizer, made.steps, made.batch) == (MODERN, 3, 8)
    assert train_preset("enwik8", recipe="paper") == train_preset("enwik8")
    assert train_preset("text-modern", recipe="modern") == train_preset("text-modern")
    assert train_preset("text-small", recipe="modern") == train_preset("text-small")
    assert train_preset("text-small", recipe="paper").optimizer == OptimizerConfig()
    with pytest.raises(ValueError, match=r"^train: recipe must be one of paper, modern, got 'old'$"):
        train_preset("enwik8", recipe="old")


FIRST_LOSSES = {
    "paper": [7.9519, 7.7393, 7.5446, 7.3932, 7.2746, 7.295],
    "modern": [7.8627, 6.8827, 5.5701, 4.8542, 4.3917, 4.7594],
}
"""Bits per byte of every fifth step. Those of the paper's recipe are older than recipes are, and must stay."""


@pytest.mark.parametrize("recipe", FIRST_LOSSES)
def test_first_losses(recipe, tmp_path):
    data = store(tmp_path / "data")
    small = {"layers": 2, "width": 64, "context": 64, "pattern": "distinct(merged(fixed(32, 8)))", "precision": "float32"}
    changes = {"steps": 30, "log_every": 5, "validate_every": 30, "validate_bytes": 1024, "model": small}
    optimizer = MODERN if recipe == "modern" else OptimizerConfig()
    train(train_preset("text-small", recipe, data=data, out=str(tmp_path / "run"), optimizer=optimizer, **changes))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["bits_per_byte"] for row in rows] == pytest.approx(FIRST_LOSSES[recipe], abs=0.002)


def test_a_modern_run_goes_on_to_the_bit(tmp_path):
    optimizer, model = vars(MODERN), {"embedding": "rotary", **RECIPES["modern"], "dropout": 0.1}
    whole, parts = (config(tmp_path / name, optimizer=optimizer, model=model) for name in ("whole", "parts"))
    train(whole)
    train(parts, until=7)
    train(parts, resume=True)
    assert same(weights(tmp_path / "whole" / "run"), weights(tmp_path / "parts" / "run"))


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"there is no preset 'text-smal'; did you mean 'text-small'\?"):
        train_preset("text-smal")
