import pytest

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


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"there is no preset 'text-smal'; did you mean 'text-small'\?"):
        train_preset("text-smal")
