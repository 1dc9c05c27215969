"""TrainConfig: all that a run depends on. It is saved as the run's config.json."""

import json
import os
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Literal

from longstride.checks import read_fields, whole_number
from longstride.model.config import ModelConfig

OPTIMIZERS = ("adamw", "muon", "adafactor")
PARALLEL = ("ddp", "fsdp")
AVERAGING = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OptimizerConfig:
    """Section 6: Adam with decoupled weight decay, linear warm-up, clipped gradients, cosine decay."""

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    """Muon takes the matrices of the blocks, and AdamW the rest."""
    learning_rate: float = 0.00035
    """The largest, after the warm-up."""
    warmup: int = 5000
    """Steps in which it grows from 0; of a shorter run at most a tenth."""
    final: float = 0.0
    """What of it is left at the end of the cosine."""
    beta1: float = 0.9
    beta2: float = 0.999
    decay: float = 0.01
    """Of weights with two or more dimensions."""
    clip: float = 1.0
    """The largest norm of all gradients together."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer: name must be one of {', '.join(OPTIMIZERS)}, got {self.name!r}")
        object.__setattr__(self, "warmup", whole_number("optimizer", "warmup", self.warmup, 0))
        for name, least, most in (
            ("learning_rate", 0, None), ("final", 0, 1), ("beta1", 0, 1), ("beta2", 0, 1), ("decay", 0, None),
            ("clip", 0, None),
        ):  # fmt: skip
            _number("optimizer", name, getattr(self, name), least, most)
        if self.clip == 0:
            raise ValueError("optimizer: clip must be more than 0, or nothing is learned; inf clips nothing")


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig
    data: str = ""
    """A prepared store, or a source: a text, an image or a sound file, or a folder of them."""
    out: str = ""
    """The run's folder."""
    steps: int = 1000
    batch: int = 8
    """Sequences of a step, over all processes."""
    accumulate: int = 1
    """Parts that the batch is computed in, one after the other, to save memory."""
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: float = 0.0
    """How much of the weights' running average each step keeps, 0.999 say; it is what is validated and saved. 0: none."""
    validate_every: int = 500
    """Steps between two validations; the last step always has one."""
    validate_bytes: int = 2**20
    """How much of the validation split that takes: sequences spread evenly over it, always the same ones."""
    patience: int = 0
    """Stop after so many validations without a better one; 0: never."""
    save_every: int = 1000
    """Steps between two checkpoints; the last step always has one."""
    keep: int = 2
    """Checkpoints that are kept: the newest ones, and that of the best validation if it has one."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    compile: bool = False
    """Whether blocks are compiled."""
    tensorboard: bool = False
    device: str = "auto"
    """Auto is the GPU if there is one."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes each has the whole model, or a part of every weight: for models that do not fit."""
    averaging: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What gradients are averaged in over processes. Auto is the precision of activations on GPUs, float32 on CPUs."""

    def __post_init__(self) -> None:
        least = {"patience": 0, "seed": 0}
        for name in (
            "steps", "batch", "accumulate", "seed", "validate_every", "validate_bytes", "patience", "save_every", "keep",
            "log_every",
        ):  # fmt: skip
            object.__setattr__(self, name, whole_number("train", name, getattr(self, name), least.get(name, 1)))
        _number("train", "ema", self.ema, 0, 1)
        for name in ("data", "out"):  # Paths are welcome too.
            object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name in ("compile", "tensorboard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"train: {name} must be true or false, got {getattr(self, name)!r}")
        for name, known in (("parallel", PARALLEL), ("averaging", AVERAGING)):
            if getattr(self, name) not in known:
                raise ValueError(f"train: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.batch % self.accumulate:
            raise ValueError(f"train: accumulate = {self.accumulate} must divide batch = {self.batch}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, owner: str = "config") -> "TrainConfig":
        """`owner` names the file in errors."""
        given = read_fields(text, owner, cls)
        optimizer = given.get("optimizer", {})
        for name, value in (("model", given["model"]), ("optimizer", optimizer)):
            if not isinstance(value, dict):
                raise ValueError(f"{owner}: {name} must be an object, got {value!r}")
        read_fields(json.dumps(optimizer), f"{owner}: optimizer", OptimizerConfig)
        model = ModelConfig.from_json(json.dumps(given["model"]), f"{owner}: model")
        try:
            return cls(**{**given, "model": model, "optimizer": OptimizerConfig(**optimizer)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{owner}: {str(error).removeprefix('train: ')}") from None


def _number(owner: str, name: str, value: object, least: float, most: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ValueError(f"{owner}: {name} must be a number of at least {least}, got {value!r}")
    if most is None and value == inf and name != "clip":
        raise ValueError(f"{owner}: {name} must be finite, got {value!r}")
    if name == "final" and value > 1:
        raise ValueError(f"{owner}: final must be at most 1, got {value!r}")
    if most is not None and value >= most and name != "final":
        raise ValueError(f"{owner}: {name} must be less than {most}, got {value!r}")
