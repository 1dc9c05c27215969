"""TrainConfig: the complete settings of a run. It is saved as the run's config.json."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from longstride.common.checks import (
    Boolean,
    Choice,
    InstanceOf,
    PathText,
    Real,
    Rule,
    Size,
    Text,
    Whole,
    check_field_names,
    check_fields,
    short_repr,
)
from longstride.common.files import parse_object, real_path
from longstride.model.config import ModelConfig
from longstride.model.saved_config import read_content

Resume = bool | Literal["auto"]
"""Whether to resume an existing run. "auto": resume it if it exists, otherwise begin it."""
PARALLEL = ("ddp", "fsdp")
OPTIMIZER_RULES: dict[str, Rule] = {
    "name": Choice("adamw", "muon", "adafactor"),
    "learning_rate": Real(0, 1000),
    "warmup": Whole(0),
    "final": Real(0, 1),
    "beta1": Real(0, 1, below=True),
    "beta2": Real(0, 1, below=True),
    "decay": Real(0, 1000),
    "clip": Real(0, 1e30, above=True, infinite=True),
    "schedule": Choice("cosine", "linear"),
    "flat": Real(0, 1, below=True),
    "embedding_factor": Real(0, 1000),
    "decayed": Choice("all", "blocks"),
    "epsilon": Real(0, 1, above=True),
    "split_projections": Boolean(),
    "momentum": Real(0, 1, below=True),
}


FITTED = ("context", "embedding", "pattern")
"""Fields of the model that can be derived from the size of the data's images."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Section 6: Adam with decoupled weight decay, linear warm-up, clipped gradients, cosine decay.

    `training.presets.OPTIMIZERS` has the settings of each recipe.
    """

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    """Muon takes the matrices of the blocks, and AdamW the rest."""
    learning_rate: float = 0.00035
    """The peak learning rate, after the warm-up."""
    warmup: int = 5000
    """Steps of linear warm-up; at most a tenth of the run."""
    final: float = 0.0
    """The final learning rate, as a fraction of the peak."""
    beta1: float = 0.9
    """Adam's decay of the running average of gradients."""
    beta2: float = 0.999
    """Adam's decay of the running average of squared gradients."""
    decay: float = 0.01
    """Decoupled weight decay, for weights with two or more dimensions."""
    clip: float = 1.0
    """The largest global gradient norm; larger gradients are scaled down to it."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls from the peak to the final one."""
    flat: float = 0.0
    """Fraction of the run before the learning rate falls, the warm-up included."""
    embedding_factor: float = 1.0
    """Learning rate of the embeddings, as a multiple of the others'."""
    decayed: Literal["all", "blocks"] = "all"
    """Which weights with two or more dimensions decay: all, or those of the blocks only."""
    epsilon: float = 1e-8
    """Adam's addition to the root of the running average of squared gradients."""
    split_projections: bool = False
    """Whether Muon takes the projections to queries, keys and values as three matrices. Not with fsdp."""
    momentum: float = 0.95
    """Muon's decay of the running average of gradients."""

    def __post_init__(self) -> None:
        check_fields("optimizer", self, OPTIMIZER_RULES)


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig
    data: str = ""
    """A prepared store, or a source: a text, an image or a sound file, or a folder of them."""
    out: str = ""
    """The run's folder."""
    init_from: str = ""
    """Begin with the weights of a run, one of its checkpoints, a saved model, or one that comes with longstride, by name.
    All shapes must match the model."""
    steps: int = 1000
    """Steps of the whole run. More steps with --resume extend it, with the learning rates of a run of the new total."""
    batch: int = 8
    """Sequences per step, over all processes."""
    accumulate: int = 1
    """Gradient accumulation: number of parts that the batch is computed in, one after the other, to save memory."""
    seed: int = 0
    """Seed of the initial weights, the batches and dropout: the same seed gives the same run."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: float = 0.0
    """Decay of the running average of the weights, such as 0.999. The average is validated and saved. 0: no average."""
    validate_every: int = 500
    """Steps between two validations; the last step always has one."""
    validate_bytes: int = 2**20
    """Bytes of the validation split to score: sequences evenly spaced over it, always the same ones."""
    patience: int = 0
    """Stop after this many validations without improvement; 0: never."""
    save_every: int = 1000
    """Steps between two checkpoints; the last step always has one."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides that of the best validation."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    compile: bool = False
    """Whether to compile the blocks with torch.compile."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Whether steps are captured as one CUDA graph, which is faster. Auto: on a single GPU, with adamw or muon, unless all
    blocks are recomputed in parts. With several processes: on, and --parallel ddp."""
    tensorboard: bool = False
    """Whether to write metrics for TensorBoard, too."""
    device: str = "auto"
    """auto, cpu or cuda; auto is the GPU if there is one."""
    gpu_memory: str = ""
    """Memory of the GPU that the run may take, such as 16GB or 80GiB; by default what is free. With --model.recompute auto
    the blocks are recomputed as far as they must be. Given without --model.recompute, it implies auto."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Over several processes: "ddp" replicates the model, "fsdp" shards every weight, for models that do not fit."""
    averaging: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of gradient averaging over processes. Auto is the precision of activations on GPUs, float32 on CPUs."""

    def __post_init__(self) -> None:
        check_fields("train", self, RULES)
        if self.batch % self.accumulate:
            raise ValueError(f"train: accumulate = {self.accumulate} must divide batch = {self.batch}")

    def folder(self) -> Path:
        """The run's folder; ValueError if `out` is not given."""
        if not self.out:
            raise ValueError("train: --out must be given: the folder of the run")
        return Path(self.out)

    def check_paths(self) -> None:
        """Raises ValueError if `data` or `out` is not given, or `out` lies in `data`."""
        if not self.data:
            raise ValueError("train: --data must be given: a prepared store, or files to make one of")
        if real_path(self.data) in (real_path(self.folder()), *real_path(self.out).parents):
            raise ValueError(f"train: --out {self.out} lies in --data {self.data}, and would become data; give another")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, owner: str = "config") -> "TrainConfig":
        """`owner` names the file in errors."""
        return cls.from_fields(parse_object(text, owner, finite=False), owner)

    @classmethod
    def read(cls, path: Path) -> "TrainConfig":
        """Reads the config.json of a run."""
        return cls.from_fields(read_content(path), str(path))

    @classmethod
    def from_fields(cls, content: dict[str, Any], owner: str) -> "TrainConfig":
        """Makes a config from the parsed fields of a JSON object."""
        given = check_field_names(content, owner, cls)
        optimizer = given.get("optimizer", {})
        for name, value in (("model", given["model"]), ("optimizer", optimizer)):
            if not isinstance(value, dict):
                raise ValueError(f"{owner}: {name} must be an object, got {short_repr(value)}")
        model = ModelConfig.from_fields(given["model"], f"{owner}: model")
        optimizer = check_field_names(optimizer, f"{owner}: optimizer", OptimizerConfig)
        try:
            return cls(**{**given, "model": model, "optimizer": OptimizerConfig(**optimizer)})
        except ValueError as error:
            raise ValueError(f"{owner}: {str(error).removeprefix('train: ')}") from None


# Configs without validation, for the command line, which validates them afterwards and prints errors in its own form.
class TypedModel(ModelConfig):
    def __post_init__(self) -> None:
        pass


class TypedOptimizer(OptimizerConfig):
    __doc__ = OptimizerConfig.__doc__

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True)
class TypedConfig(TrainConfig):
    model: TypedModel
    optimizer: TypedOptimizer = field(default_factory=TypedOptimizer)

    def __post_init__(self) -> None:
        pass

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Returns the same fields without validation."""
        parts = {"model": TypedModel(**vars(config.model)), "optimizer": TypedOptimizer(**vars(config.optimizer))}
        return cls(**{**vars(config), **parts})

    def checked(self) -> TrainConfig:
        """Returns the validated config, or raises ValueError."""
        parts = {"model": ModelConfig(**vars(self.model)), "optimizer": OptimizerConfig(**vars(self.optimizer))}
        return TrainConfig(**{**vars(self), **parts})


def fields_to_fit(words: Iterable[str]) -> list[str]:
    """Returns the fields of FITTED that a command line does not set."""
    given = {word.split("=")[0] for word in words}
    return [name for name in FITTED if f"--model.{name}" not in given]


RULES: dict[str, Rule] = {
    "model": InstanceOf(ModelConfig),
    "data": PathText(),
    "out": PathText(),
    "init_from": PathText(),
    "steps": Whole(1),
    "batch": Whole(1, "batch"),
    "accumulate": Whole(1),
    "seed": Whole(0),
    "optimizer": InstanceOf(OptimizerConfig),
    "ema": Real(0, 1, below=True),
    "validate_every": Whole(1),
    "validate_bytes": Whole(1),
    "patience": Whole(0),
    "save_every": Whole(1),
    "keep": Whole(1),
    "log_every": Whole(1),
    "compile": Boolean(),
    "capture": Choice("auto", "on", "off"),
    "tensorboard": Boolean(),
    "device": Text(),
    "gpu_memory": Size(),
    "parallel": Choice(*PARALLEL),
    "averaging": Choice("auto", "float32", "bfloat16", "float16"),
}
