"""Recipes: named sets of ModelConfig fields besides the size of a network. `training.presets` adds training settings.

"paper" is the network of the paper. "modern" has what earned its place in short runs on enwik8 (docs/log.md).
"""

from dataclasses import replace
from typing import Any, Literal, get_args

from longstride.common.checks import short_repr
from longstride.model.config import ModelConfig
from longstride.model.positions import ROTARY

RecipeName = Literal["paper", "modern"]
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"init": "release", "norm": "layer", "qk_norm": False, "last_bytes": 1},
    "modern": {"init": "modern", "norm": "rms", "qk_norm": True, "last_bytes": 3},
}
assert set(RECIPES) == set(get_args(RecipeName))


def check_recipe(owner: str, name: object) -> None:
    if name not in RECIPES:
        raise ValueError(f"{owner}: recipe must be one of {', '.join(RECIPES)}, got {short_repr(name)}")


def apply_recipe(config: ModelConfig, name: str) -> ModelConfig:
    """Returns the config with the fields of a recipe; sizes, patterns, dropout and precision stay.

    Positions of streams become rotary, or a matrix as wide as the longest period of the patterns. An image(...) embedding
    stays: it says what the images are.
    """
    check_recipe("apply_recipe", name)
    embedding = config.embedding
    if name == "modern" and len(config.positions.sizes) == 2:
        embedding = ROTARY
    elif name == "paper" and config.is_rotary:
        embedding = f"matrix({config.period})"
    return replace(config, embedding=embedding, **RECIPES[name])
