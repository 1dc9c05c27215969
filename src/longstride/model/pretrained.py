"""Saved models: a folder with config.json and model.safetensors. Nothing is unpickled.

Weights are float32 in a model. Their file may have them in half the bytes, as float16 or bfloat16.
"""

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
from longstride.model.shipped import NAMES, find_model, why_absent

CHANGEABLE = ("dropout", "precision", "recompute", "chunk")
"""Config fields that may change on loading: they do not affect the weights."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of the weights in model.safetensors."""
SHARDS = "model.safetensors.index.json"
"""What transformers writes beside weights in several files."""
WEIGHT_BYTES = 2
"""The fewest bytes of a weight in model.safetensors."""


def save(folder: str | Path, config: ModelConfig, weights: dict[str, Tensor], dtype: str = "float32") -> None:
    """Writes config.json and model.safetensors. `dtype`: a name of DTYPES; ValueError if a weight is too large for it."""
    folder = Path(folder)
    save_weights(folder, weights, dtype=dtype)
    with atomic_path(folder / "config.json") as path:
        path.write_text(config.to_json())


def save_weights(
    folder: Path, weights: dict[str, Tensor], metadata: dict[str, str] | None = None, dtype: str = "float32"
) -> None:  # fmt: skip
    """Writes model.safetensors. `metadata` goes to the file's header."""
    converted = {name: x.detach().float().to(DTYPES[dtype]).contiguous().cpu() for name, x in weights.items()}
    if dtype != "float32":
        for name, x in converted.items():
            if not x.isfinite().all():
                raise ValueError(
                    f"{folder}: {short_repr(name)} has values that are too large for {dtype}; give another dtype"
                )
    with atomic_path(folder / "model.safetensors") as path:
        save_file(converted, path, metadata)


def load(folder: str | Path, changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Reads a saved model, or one that comes with longstride, by its name: its config with these changes, and its weights,
    which are finite and in float32."""
    folder = find_model(folder)
    owner = folder / "model.safetensors"
    settings = settings_path(folder)
    for path in (settings, owner):
        if not path.is_file():
            if str(folder) in NAMES and not folder.exists():
                raise ValueError(f"from_pretrained: {folder} is not here: {why_absent(str(folder))}")
            if path == owner and (folder / SHARDS).is_file():
                raise ValueError(
                    f"{folder} has its weights in shards, by {SHARDS}; read it with LongstrideForCausalLM, and save it "
                    "with a larger max_shard_size"
                )
            if not folder.exists():
                names = ", ".join(NAMES)
                raise ValueError(f"{folder} is no saved model: there is no such folder; by name there are {names}")
            raise ValueError(f"{folder} is no saved model: it has no {path.name}")
    for name in changes:
        if name not in CHANGEABLE:
            raise ValueError(f"from_pretrained: {name} cannot be changed, only {', '.join(CHANGEABLE)}")
    config = replace(read_config(settings), **changes)
    size, needed = owner.stat().st_size, WEIGHT_BYTES * config.parameters
    if size < needed:
        raise ValueError(
            f"{owner} cannot be read: it has {size:,} bytes, and {settings} asks for "
            f"{config.parameters:,} weights, which have {needed:,} or more"
        )
    check_memory(config, torch.device("cpu"))
    try:
        weights = load_file(owner)
    except Exception as error:  # Any kind: the file is untrusted.
        raise ValueError(f"{owner} cannot be read: {short_reason(error)}") from None
    for name, x in weights.items():
        if x.dtype not in DTYPES.values():
            raise ValueError(f"{owner}: {short_repr(name)} is {x.dtype}; weights must be one of {', '.join(DTYPES)}")
        check_finite(owner, name, x)
    return config, {name: x.float() for name, x in weights.items()}


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
