"""A small run for tests: real text that is bundled, and a network that takes a moment a step."""

from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import load_file

from longstride.data import samples
from longstride.data.store import write_store
from longstride.model import ModelConfig
from longstride.training import OptimizerConfig, TrainConfig

MODEL = ModelConfig(
    layers=2, width=32, heads=2, context=64, pattern="merged(fixed(8, 2))", embedding="matrix(8)", dropout=0.2
)
TEXT = samples.text()


def store(folder, train=None, valid=None):
    given = {"train": TEXT[:60_000] if train is None else train, "valid": TEXT[60_000:68_000] if valid is None else valid}
    write_store(folder, "text", {name: np.asarray(data) for name, data in given.items()})
    return str(folder)


def config(tmp_path, **changes):
    data = changes.pop("data", None) or store(tmp_path / "data")
    model = replace(MODEL, **changes.pop("model", {}))
    optimizer = OptimizerConfig(**{"learning_rate": 0.003, "warmup": 5, **changes.pop("optimizer", {})})
    given = {"steps": 12, "batch": 4, "log_every": 3, "validate_every": 6, "validate_bytes": 1024, "save_every": 5}
    return TrainConfig(model=model, data=data, out=str(tmp_path / "run"), optimizer=optimizer, **{**given, **changes})


def weights(run):
    """Of the last checkpoint of one process: everything that the next step depends on."""
    (last,) = sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))[-1:]
    (state,) = (last / "state").iterdir()
    return {**load_file(last / "model.safetensors"), **load_file(state)}


def same(one, two):
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def step(trainer, tokens):
    """Takes a step, waits for it and returns its metrics."""
    trainer.take_step(tokens)
    return trainer.finish_steps()
