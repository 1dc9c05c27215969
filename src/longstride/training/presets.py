"""Training settings of each model preset. The paper states epochs and some learning rates; the rest is chosen here.

Steps follow from epochs of the data set at that batch: 120 of CIFAR-10's 48,000 images, 80 of enwik8's 90 million bytes, 70
of ImageNet's 1.28 million images.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from math import inf
from typing import Any, TypeVar

from longstride.common.checks import short_repr, suggest
from longstride.model import ModelConfig, preset
from longstride.model.recipes import apply_recipe, check_recipe
from longstride.training.config import OptimizerConfig, TrainConfig

Config = TypeVar("Config", TrainConfig, ModelConfig, OptimizerConfig)
PAPER = OptimizerConfig()
MODERN = OptimizerConfig(
    name="muon", learning_rate=0.004, embedding_factor=2.5, warmup=40, schedule="linear", flat=0.3, final=0.02, beta2=0.99,
    epsilon=1e-10, decay=0.05, decayed="blocks", clip=inf, split_projections=True,
)  # fmt: skip
OPTIMIZERS = {"paper": PAPER, "modern": MODERN}
"""The optimizer of each recipe; `model.recipes` has the fields of the network."""
SMALL = OptimizerConfig(name="muon", learning_rate=0.006, warmup=50, beta2=0.99)
"""Small networks have minutes, not days, and Muon learns much faster than AdamW (docs/log.md)."""
SMALL_MODERN = replace(MODERN, learning_rate=0.008, momentum=0.9)
MEDIUM = replace(MODERN, learning_rate=0.005)
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10": {"steps": 180_000, "batch": 32, "optimizer": PAPER, "patience": 20},
    "enwik8": {"steps": 73_000, "batch": 8, "optimizer": PAPER, "patience": 20},
    "imagenet64": {"steps": 700_000, "batch": 128, "accumulate": 16, "optimizer": PAPER},
    "music-65536": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "music-262144": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "music-1048576": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "text-small": {"steps": 1000, "batch": 4, "optimizer": SMALL_MODERN, "validate_every": 200, "validate_bytes": 2**16},
    "image-small": {"steps": 1000, "batch": 4, "optimizer": SMALL, "validate_every": 200, "validate_bytes": 2**16},
    "audio-small": {"steps": 1000, "batch": 2, "optimizer": SMALL, "validate_every": 200, "validate_bytes": 2**16},
    "text-medium": {"steps": 20_000, "batch": 4, "optimizer": MEDIUM},
    "image-medium": {"steps": 10_000, "batch": 12, "optimizer": MEDIUM},
    "audio-medium": {"steps": 10_000, "batch": 2, "optimizer": MEDIUM},
    "text-modern": {"steps": 10_300, "batch": 4, "optimizer": MODERN},
}


def train_preset(name: str, recipe: str | None = None, **changes: Any) -> TrainConfig:
    """Returns the complete training settings of a preset.

    `recipe`: "paper" or "modern", for other fields of the network and another optimizer than the preset's own.
    `changes` are fields of TrainConfig; `model` and `optimizer` are a whole config, or a dict of the fields that change:
    train_preset("text-small", steps=2000, model={"layers": 2}, optimizer={"learning_rate": 0.01})
    """
    config = TrainConfig(model=preset(name), **SETTINGS[name.removesuffix("-dense")])
    if recipe is not None:
        config = with_recipe(config, recipe)
    return _changed("train_preset", config, changes)


def with_recipe(config: TrainConfig, name: str) -> TrainConfig:
    """Returns the settings with the network's fields and the optimizer of a recipe; sizes, steps and batch stay.

    A network that has the recipe already keeps its optimizer.
    """
    check_recipe("train", name)
    model = apply_recipe(config.model, name)
    return config if model == config.model else replace(config, model=model, optimizer=OPTIMIZERS[name])


def _changed(owner: str, config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy with some fields changed. A dict for a field that is a config changes fields of that config."""
    known = [field.name for field in fields(config)]
    for name in changes:
        if name not in known:
            raise ValueError(f"{owner}: there is no field {short_repr(name)}; {suggest(str(name), known)}")
    nested = {
        name: _changed(f"{owner}: {name}", getattr(config, name), value)
        for name, value in changes.items()
        if is_dataclass(getattr(config, name)) and isinstance(value, Mapping)
    }
    return replace(config, **{**changes, **nested})
