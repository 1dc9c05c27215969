"""The weights that a run begins with, if --init-from names some."""

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstride.common.checks import shown
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.pretrained import CHANGEABLE, load
from longstride.training.distributed import copy_weight
from longstride.training.source import WEIGHTS, open_source

SHAPELESS = {*CHANGEABLE, "pattern", "init"}
"""Fields of ModelConfig that no weight's shape depends on."""


class Initial:
    """Weights that fit the model, or ValueError."""

    def __init__(self, path: str, model: ModelConfig) -> None:
        source = open_source("train: init_from", Path(path).expanduser())
        config, self.weights = load(source.weights, {})
        self._check(path, config, model)
        with (source.weights / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.record = {"path": str(source.weights.absolute()), "sha256": digest}
        """For run.json."""

    def fill(self, model: nn.Module) -> None:
        """Copies them into the model, or this process's part of them."""
        for name, x in model.state_dict().items():
            copy_weight(x, self.weights[name], name)

    def _check(self, path: str, theirs: ModelConfig, ours: ModelConfig) -> None:
        with torch.device("meta"):
            wanted = {name: list(x.shape) for name, x in SparseTransformer(ours).state_dict().items()}
        names = [field.name for field in fields(ModelConfig) if field.name not in SHAPELESS]
        other = [name for name in names if getattr(theirs, name) != getattr(ours, name)]
        options = " ".join(f"--model.{name.replace('_', '-')} {_typed(getattr(theirs, name))}" for name in other)
        hint = f"; its model has {options}" if options else ""
        for name, shape in wanted.items():
            if name not in self.weights:
                raise ValueError(f"train: init_from = {path!r} has no {name}, which this model has of shape {shape}{hint}")
            if list(self.weights[name].shape) != shape:
                have = list(self.weights[name].shape)
                raise ValueError(f"train: init_from = {path!r} has {name} of shape {have}, and this model of {shape}{hint}")
        for name in self.weights:
            if name not in wanted:
                raise ValueError(f"train: init_from = {path!r} has {shown(name)}, and this model has no such weight{hint}")


def _typed(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
