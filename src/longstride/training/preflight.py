"""Checks of settings and data before a run writes anything, and fields of the model derived from data and device."""

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstride.common.device import prefers_bfloat16
from longstride.data.image_files import shape_text
from longstride.data.kinds import all_kinds
from longstride.data.prepare import open_data
from longstride.data.store import Store, verify_once
from longstride.model import ModelConfig
from longstride.model.config import Precision
from longstride.model.presets import DENSE
from longstride.model.recompute import IN_PARTS
from longstride.training.config import FITTED, Resume, TrainConfig
from longstride.training.ranks import Ranks
from longstride.training.run import Run

AUTO = "auto"
STRIDE = re.compile(r"(?<=\()\d+(?=\))")
"""The number in strided(96), local(96) and column(96)."""


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raises ValueError if these processes cannot train this config."""
    config.check_paths()
    if config.parallel == "fsdp" and config.optimizer.name == "adafactor" and ranks.count > 1:
        raise ValueError("train: PyTorch's Adafactor cannot work on parts of weights; use --parallel ddp, or adamw or muon")
    if config.parallel == "fsdp" and ranks.count > 1 and any(choice in IN_PARTS for choice in config.model.recomputed):
        raise ValueError(
            f"train: recompute = {config.model.recompute!r} is not possible with --parallel fsdp; use off, selective or on"
        )
    if config.batch % (ranks.count * config.accumulate):
        raise ValueError(
            f"train: batch = {config.batch} must be a multiple of {ranks.count} processes times "
            f"accumulate = {config.accumulate}"
        )


def open_verified(data: str | Path, ranks: Ranks, splits: Sequence[str] = ("train", "valid")) -> Store:
    """Opens the store of the data and compares the bytes of these splits with its manifest, in one process per machine.
    Files that have not changed since the last comparison are not read again."""
    store = open_data(data)
    for split in splits:
        store.path(split)
    if ranks.local_rank == 0:
        verify_once(store, splits, progress=ranks.is_main)
    return store


def check_fits(owner: str, store: Store, model: ModelConfig, advice: str = "give other --data") -> None:
    """Raises ValueError if the model cannot read the data.

    Images need a model for images of their size, or a context of one image; other data needs a model for streams. `advice`:
    the end of a message.
    """
    sizes = model.positions.sizes
    data = f"{owner}: {store.shown} has {store.data_kind.describe()}"
    if len(sizes) == 3 and tuple(store.item) != tuple(sizes):
        raise ValueError(f"{data}, and the model is for images of {shape_text(sizes)}; {advice}")
    if store.item and model.context != store.item_bytes:
        raise ValueError(f"{data}, and the model's context of {model.context:,} bytes is not one image; {advice}")


def check_training_data(store: Store, config: TrainConfig, preset: str = "") -> None:
    """Raises ValueError if the model or its preset is for other data, with the presets or flags that fit.

    `preset`: the preset that the model was made from; it must be one for this kind of data. Bytes may be anything.
    """
    kind, name = store.data_kind, preset.removesuffix(DENSE)
    presets = f"presets for {kind.name}: {', '.join(kind.presets)}"
    other = next((other.name for other in all_kinds() if not other.has_items and name in other.presets), None)
    if not store.item and other is not None and name not in kind.presets and not kind.takes_any_preset:
        raise ValueError(f"train: {config.data} has {kind.name}, and {preset} is for {other}; {presets}")
    changes = _fields_for_images(config, store) if len(config.model.positions.sizes) == 3 else {}
    flags = " ".join(f"--model.{name} {shlex.quote(str(value))}" for name, value in changes.items())
    check_fits("train", store, config.model, f"give {flags}" if flags else presets)


def fit_to_data(
    config: TrainConfig, fit: Collection[str], resume: Resume, ranks: Ranks, say: Callable[[str], None]
) -> TrainConfig:  # fmt: skip
    """Returns the config with the model's fields in `fit` derived from the data's images, if the model is for images.

    The context becomes the bytes of an image, the embedding its height, width and channels, and the pattern's stride the
    bytes of a row. `say` gets one line with the fields that change.
    """
    for name in fit:
        if name not in FITTED:
            raise ValueError(f"train: fit must name some of {', '.join(FITTED)}, got {name!r}")
    if not fit or len(config.model.positions.sizes) != 3:
        return config
    # Settings and folder are checked first: preparing the data may take long.
    ranks.run_on_all(lambda: check_settings(config, ranks))
    ranks.run_on_all(lambda: Run.exists(config) if resume else Run.new(config))
    store = ranks.run_first_per_machine(lambda: open_verified(config.data, ranks))
    changes = {name: value for name, value in _fields_for_images(config, store).items() if name in fit}
    changes = {name: value for name, value in changes.items() if value != getattr(config.model, name)}
    if not changes:
        return config
    derived = ", ".join(f"{name} {value}" for name, value in changes.items())
    say(f"{config.data} has {store.data_kind.describe()}; from that follow: {derived}")
    return ranks.run_on_all(lambda: replace(config, model=replace(config.model, **changes)))


def resolve_precision(config: TrainConfig, resume: Resume, ranks: Ranks) -> TrainConfig:
    """Returns the config with a precision in the place of "auto": what suits the device, or the run's if it is resumed."""
    if config.model.precision != AUTO:
        return config
    path = config.folder() / "config.json"
    if resume and path.is_file():
        saved = TrainConfig.read(path)
        return replace(config, model=replace(config.model, precision=saved.model.precision))
    device = ranks.run_on_all(lambda: ranks.device(config.device))
    precision: Precision = "float32" if ranks.any(not prefers_bfloat16(device)) else "bfloat16"
    return replace(config, model=config.model.resolved(precision))


def _fields_for_images(config: TrainConfig, store: Store) -> dict[str, Any]:
    """Returns the model's fields for the data's images; empty if there are no images, or of the model's own size."""
    if not store.item or tuple(store.item) == tuple(config.model.positions.sizes):
        return {}
    height, width, channels = store.item
    return {
        "context": height * width * channels,
        "embedding": f"image({height}, {width}, {channels})",
        "pattern": STRIDE.sub(str(width * channels), config.model.pattern),
    }
