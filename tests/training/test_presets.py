import re
from dataclasses import replace

import pytest

from longstride.data.kinds import all_kinds
from longstride.model import preset
from longstride.model.presets import PRESETS
from longstride.training import train_preset
from longstride.training.presets import SETTINGS


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


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"there is no preset 'text-smal'; did you mean 'text-small'\?"):
        train_preset("text-smal")
