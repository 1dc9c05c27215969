"""A preset for images takes the size of the images in the data; a model and a kind of data that do not fit are refused."""

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from longstride.data.image_files import shape_text
from longstride.data.kinds import all_kinds
from longstride.data.store import Store
from longstride.model.presets import DENSE
from longstride.training.config import FITTED, TrainConfig
from longstride.training.preflight import check_settings, open_verified
from longstride.training.ranks import Ranks
from longstride.training.run import Resume, Run

STRIDE = re.compile(r"(?<=\()\d+(?=\))")
"""The number in strided(96), local(96) and column(96)."""


def fit_to_data(
    config: TrainConfig, fit: Collection[str], resume: Resume, ranks: Ranks, say: Callable[[str], None]
) -> TrainConfig:  # fmt: skip
    """The config with those fields of its model that `fit` names made for the data's images, if it is for other ones.

    The context becomes the bytes of an image, the embedding its height, width and channels, and the pattern's stride the
    bytes of a row. `say` gets one line with all that was derived.
    """
    for name in fit:
        if name not in FITTED:
            raise ValueError(f"train: fit must name some of {', '.join(FITTED)}, got {name!r}")
    if not fit or len(config.model.positions.sizes) != 3:
        return config
    # Settings and folder come first: to prepare the data may take long.
    ranks.run_on_all(lambda: check_settings(config, ranks))
    ranks.run_on_all(lambda: Run.exists(config) if resume else Run.new(config))
    store = ranks.run_first_per_machine(lambda: open_verified(config.data, ranks))
    changes = {name: value for name, value in _derived(config, store).items() if name in fit}
    changes = {name: value for name, value in changes.items() if value != getattr(config.model, name)}
    if not changes:
        return config
    made = ", ".join(f"{name} {value}" for name, value in changes.items())
    say(f"{config.data} has {store.data_kind.describe()}; from that follow: {made}")
    return ranks.run_on_all(lambda: replace(config, model=replace(config.model, **changes)))


def _derived(config: TrainConfig, store: Store) -> dict[str, Any]:
    """What the model needs for images of another size than its own."""
    if not store.item or tuple(store.item) == tuple(config.model.positions.sizes):
        return {}
    height, width, channels = store.item
    return {
        "context": height * width * channels,
        "embedding": f"image({height}, {width}, {channels})",
        "pattern": STRIDE.sub(str(width * channels), config.model.pattern),
    }


def check_kind(store: Store, config: TrainConfig, preset: str = "") -> None:
    """Images need a model for images of their size, or at least a context of one image; other data needs one for streams.

    `preset`: the preset that the model was made from; it must be one for this kind of data. Bytes may be anything.
    """
    kind, name = store.data_kind, preset.removesuffix(DENSE)
    sizes, presets = config.model.positions.sizes, ", ".join(kind.presets)
    if not store.item:
        other = next((other.name for other in all_kinds() if not other.has_items and name in other.presets), None)
        if other is not None and name not in kind.presets and not kind.takes_any_preset:
            raise ValueError(
                f"train: {config.data} has {store.kind}, and {preset} is for {other}; presets for {store.kind}: {presets}"
            )
        if len(sizes) == 3:
            raise ValueError(
                f"train: {config.data} has {store.kind}, and the model is for images of {shape_text(sizes)}; presets for "
                f"{store.kind}: {presets}"
            )
        return
    have = f"train: {config.data} has {store.data_kind.describe()}"
    if len(sizes) == 3 and tuple(store.item) != tuple(sizes):
        options = " ".join(f"--model.{name} {shlex.quote(str(value))}" for name, value in _derived(config, store).items())
        raise ValueError(f"{have}, and the model's embedding is for {shape_text(sizes)}; give {options}")
    if config.model.context != store.item_bytes:
        raise ValueError(
            f"{have}, and the model reads {config.model.context:,} bytes that are no image; presets for images: {presets}"
        )
