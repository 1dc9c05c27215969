"""Saved models: a folder with config.json and model.safetensors. Nothing is unpickled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longstride.common.atomic import atomic_path
from longstride.common.checks import short_reason, short_repr
from longstride.common.tensor_file import check_finite, save_file
from longstride.model.config import ModelConfig
from longstride.model.cost import check_memory
from longstride.model.saved_config import read_config, settings_path

CHANGEABLE = ("dropout", "precision", "recompute", "chunk")
"""Config fields that may change on loading: they do not affect the weights."""
WEIGHT_BYTES = 4
"""Bytes of a weight in model.safetensors, float32."""


def save(folder: str | Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    folder = Path(folder)
    save_weights(folder, weights)
    with atomic_path(folder / "config.json") as path:
        path.write_text(config.to_json())


def save_weights(folder: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes model.safetensors. `metadata` goes to the file's header."""
    with atomic_path(folder / "model.safetensors") as path:
        save_file({name: x.detach().float().contiguous().cpu() for name, x in weights.items()}, path, metadata)


def load(folder: str | Path, changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a saved model: its config with these changes, and its weights, which are finite and in float32."""
    folder = Path(folder)
    owner = folder / "model.safetensors"
    settings = settings_path(folder)
    for path in (settings, owner):
        if not path.is_file():
            raise ValueError(f"{folder} is no saved model: it has no {path.name}")
    for name in changes:
        if name not in CHANGEABLE:
            raise ValueError(f"from_pretrained: {name} cannot be changed, only {', '.join(CHANGEABLE)}")
    config = replace(read_config(settings), **changes)
    size, needed = owner.stat().st_size, WEIGHT_BYTES * config.parameters
    if size < needed:
        raise ValueError(
            f"{owner} cannot be read: it has {size:,} bytes, and {settings} asks for "
            f"{config.parameters:,} weights, which have {needed:,}"
        )
    check_memory(config, torch.device("cpu"))
    try:
        weights = load_file(owner)
    except Exception as error:  # Any kind: the file is untrusted.
        raise ValueError(f"{owner} cannot be read: {short_reason(error)}") from None
    for name, x in weights.items():
        if x.dtype != torch.float32:
            raise ValueError(f"{owner}: {short_repr(name)} is {x.dtype}; weights must be float32, as they are saved")
        check_finite(owner, name, x)
    return config, weights


def check(folder: str | Path, wanted: dict[str, tuple[int, ...]], weights: dict[str, Tensor]) -> None:
    """Raises ValueError unless `weights` has exactly the wanted tensors, with these shapes."""
    owner = Path(folder) / "model.safetensors"
    for name, shape in wanted.items():
        if name not in weights:
            raise ValueError(f"{owner}: {name} is missing; config.json asks for it, of shape {list(shape)}")
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{owner}: {name} has shape {list(weights[name].shape)}; config.json asks for {list(shape)}")
    for name in weights:
        if name not in wanted:
            raise ValueError(
                f"{owner}: {short_repr(name)} is not a tensor of this model; config.json asks for none of that name"
            )
