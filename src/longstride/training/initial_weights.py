"""Initial weights of a run from another run or a saved model (--init-from)."""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstride.common.checks import short_repr
from longstride.common.files import file_sha256
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.pretrained import CHANGEABLE, load
from longstride.training.distributed import copy_weight
from longstride.training.run import WEIGHTS
from longstride.training.source import open_source

SHAPELESS = {*CHANGEABLE, "pattern", "init"}
"""Fields of ModelConfig that no weight's shape depends on."""


class InitialWeights:
    """Weights from a path, checked against the model; ValueError if a name or shape differs."""

    def __init__(self, path: str, model: ModelConfig) -> None:
        source = open_source("train: init_from", Path(path).expanduser())
        config, self.weights = load(source.weights, {})
        self._check(path, config, model)
        self.record = {"path": str(source.weights.absolute()), "sha256": file_sha256(source.weights / WEIGHTS)}
        """Path and SHA-256 of the weights, for run.json."""

    def fill(self, model: nn.Module) -> None:
        """Copies the weights into the model; for a sharded model, this process's shard."""
        for name, x in model.state_dict().items():
            copy_weight(x, self.weights[name], name)

    def _check(self, path: str, theirs: ModelConfig, ours: ModelConfig) -> None:
        with torch.device("meta"):
            wanted = {name: list(x.shape) for name, x in SparseTransformer(ours).state_dict().items()}
        names = [field.name for field in fields(ModelConfig) if field.name not in SHAPELESS]
        other = [name for name in names if getattr(theirs, name) != getattr(ours, name)]
        options = " ".join(f"--model.{name.replace('_', '-')} {_typed(getattr(theirs, name))}" for name in other)
        hint = (
            f"; its model has {options}; --config {shlex.quote(path)} without --model flags takes the whole model"
            if options
            else ""
        )
        for name, shape in wanted.items():
            if name not in self.weights:
                raise ValueError(f"train: init_from = {path!r} has no {name}, which this model has of shape {shape}{hint}")
            if list(self.weights[name].shape) != shape:
                have = list(self.weights[name].shape)
                raise ValueError(f"train: init_from = {path!r} has {name} of shape {have}, and this model of {shape}{hint}")
        for name in self.weights:
            if name not in wanted:
                raise ValueError(
                    f"train: init_from = {path!r} has {short_repr(name)}, and this model has no such weight{hint}"
                )


def _typed(value: Any) -> str:
    """Formats a value as it is typed on the command line."""
    return f"'{value}'" if isinstance(value, str) else str(value)
