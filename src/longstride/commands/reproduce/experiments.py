"""The experiments as data: rows, each a preset with the fields that differ, and the paper's figures. Needs no torch."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from longstride.commands.reproduce.settings import ScaleName
from longstride.common.checks import short_repr, suggest
from longstride.model.recompute import AUTO
from longstride.training.config import TrainConfig
from longstride.training.presets import train_preset

DataName = Literal["text", "images"]
Changes = Mapping[str, Any]
SHORT: Changes = {
    "optimizer": {"name": "muon", "learning_rate": 0.003, "warmup": 50},
    "model": {"dropout": 0.0},
    "patience": 0,
}
"""Short runs of the paper's networks: Adam's warm-up alone takes 5,000 steps, and dropout is for many epochs."""
TEXT_LAYERS, IMAGE_LAYERS = 12, 32
"""Of short runs, instead of 30 and 128: steps take 0.4 and a quarter of the time."""
VALIDATIONS, LOGS, SAVES = 20, 50, 5
"""How often a short run validates, logs and saves. Values at equal bytes and seconds are read off the validations."""
TINY_STEPS, TINY_WIDTH, TINY_HEADS = 4, 32, 2
TINY_DEPTH, TINY_CONTEXT = 64, 32
"""What layers and the context of text are divided by; there are at least 2 layers, and 64 bytes."""


@dataclass(frozen=True)
class Row:
    """A network to train."""

    name: str
    preset: str
    data: DataName
    model: Changes = field(default_factory=dict)
    """Fields of the network that differ from the preset's."""
    reduced: Changes = field(default_factory=dict)
    """Fields of TrainConfig that differ from the preset's, at --scale reduced."""
    full: Changes = field(default_factory=dict)
    paper_bits: float | None = None
    paper_time: float | None = None
    """Time of an iteration in the paper's table 2, which states neither unit nor batch."""


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    rows: tuple[Row, ...]
    min_contexts: tuple[int, ...] = (0,)
    """The least contexts at which a network is scored; the last is the row's result."""
    paper: Mapping[int, float] = field(default_factory=dict)
    """Bits per byte in the paper, by least context."""
    seconds: float | None = None
    """Time that each row trains, unless steps are given."""
    most_bytes: int | None = None
    """Bytes that are scored at --scale reduced; None: the whole split."""

    def select(self, names: tuple[str, ...]) -> list[Row]:
        """The rows of these names, or all; ValueError for another name."""
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                near = suggest(name, known)
                rest = f"; all: {', '.join(known)}" if near.endswith("?") else ""
                raise ValueError(f"reproduce: {self.name} has no row {short_repr(name)}; {near}{rest}")
        return [row for row in self.rows if not names or row.name in names]


def _short(steps: int, layers: int | None = None, **changes: Any) -> Changes:
    """`layers`: instead of the row's."""
    model = SHORT["model"] if layers is None else {**SHORT["model"], "layers": layers}
    return {**SHORT, "steps": steps, "model": model, **changes}


def _text(name: str, pattern: str | None, paper_bits: float, paper_time: float) -> Row:
    model = {} if pattern is None else {"pattern": pattern}
    return Row(f"enwik8-{name}", "enwik8", "text", model, _short(800, TEXT_LAYERS), {}, paper_bits, paper_time)


def _image(name: str, pattern: str | None, paper_bits: float, paper_time: float) -> Row:
    model = {} if pattern is None else {"pattern": pattern}
    return Row(
        f"cifar10-{name}", "cifar10", "images", model, _short(1500, IMAGE_LAYERS, batch=16), {}, paper_bits, paper_time
    )


FIXED = _text("fixed", None, paper_bits=0.99, paper_time=0.55)
TABLE_2 = Experiment(
    "table2",
    "table 2: dense, fixed and strided attention",
    (
        _text("dense", "dense()", paper_bits=1.00, paper_time=1.31),
        FIXED,
        _text("strided", "interleave(strided(128))", paper_bits=1.13, paper_time=0.35),
        _image("dense", "dense()", paper_bits=2.82, paper_time=0.54),
        _image("fixed", "distinct(merged(fixed(96, 8)))", paper_bits=2.85, paper_time=0.47),
        _image("strided", None, paper_bits=2.80, paper_time=0.38),
    ),
)
PAPER_TABLE_3 = {6144: 0.9952, 9216: 0.9936, 10_752: 0.9932, 11_904: 0.9930, 12_096: 0.9922, 12_160: 0.9908}
TABLE_3 = Experiment(
    "table3",
    "table 3: bits per byte by least context",
    (replace(FIXED, paper_bits=None, paper_time=None),),
    (0, *PAPER_TABLE_3),
    PAPER_TABLE_3,
    most_bytes=500_000,
)
CONTEST = Experiment(
    "contest",
    "contest: enwik8 in seven minutes",
    (
        Row("text-modern", "text-modern", "text"),
        Row("text-modern-512", "text-modern", "text", {"width": 512, "heads": 8}),
        Row("dense-1024", "text-modern-dense", "text", {"context": 1024}, {"batch": 32}, {"batch": 32}),
    ),
    (0, 512),
    seconds=420,
)
CONTEST_25 = Experiment(
    "contest-25",
    "contest-25: enwik8 in 25 minutes",
    # Many epochs: without dropout validation gets worse from the middle on (docs/log.md).
    (Row("text-modern", "text-modern", "text", {"dropout": 0.2}),),
    (0, 512),
    seconds=1500,
)


def _text_ablation(name: str, **model: Any) -> Row:
    return Row(f"text-{name}", "enwik8", "text", {"layers": TEXT_LAYERS, **model}, _short(600, batch=4), _short(6000))


def _image_ablation(name: str, **model: Any) -> Row:
    changes = {"layers": IMAGE_LAYERS, **model}
    return Row(f"image-{name}", "cifar10", "images", changes, _short(1000, batch=8), _short(10_000, batch=16))


def _strided_text(l: int) -> dict[str, str]:
    return {"pattern": f"distinct(merged(fixed({l}, 32)))", "embedding": f"matrix({l})"}


ABLATIONS = Experiment(
    "ablations",
    "ablations: short runs of the same bytes",
    (
        _text_ablation("base"),
        _text_ablation("init-paper", init="paper"),
        _text_ablation("init-modern", init="modern"),
        _text_ablation("interleaved", pattern="distinct(interleave(fixed(128, 32)))"),
        _text_ablation("equal-heads", pattern="merged(fixed(128, 32))"),
        _text_ablation("c-8", pattern="distinct(merged(fixed(128, 8)))"),
        _text_ablation("c-16", pattern="distinct(merged(fixed(128, 16)))"),
        _text_ablation("stride-64", **_strided_text(64)),
        _text_ablation("stride-256", **_strided_text(256)),
        _image_ablation("base"),
        _image_ablation("init-paper", init="paper"),
        _image_ablation("ratio-1", pattern="column(96) + local(96)"),
        _image_ablation("ratio-7", pattern="column(96) + 7*local(96)"),
        _image_ablation("merged", pattern="merged(strided(96))"),
        _image_ablation("stride-128", pattern="column(128) + 3*local(128)"),
        _image_ablation("layers-128", layers=128),
        _image_ablation("layers-256", layers=256),
    ),
    most_bytes=1_000_000,
)
EXPERIMENTS = {one.name: one for one in (TABLE_2, TABLE_3, CONTEST, CONTEST_25, ABLATIONS)}
"""Those that train networks; table4 is `longstride bench memory`."""


def config_of(row: Row, scale: ScaleName, on_gpu: bool, seed: int = 0, steps: int | None = None) -> TrainConfig:
    """The settings of a row, without data and folder."""
    changes = dict(row.full if scale == "full" else row.reduced)
    model = {**changes.pop("model", {}), **row.model}
    config = train_preset(row.preset, **changes, model=model, seed=seed, accumulate=1)
    config = replace(config, model=replace(config.model, recompute=AUTO if on_gpu else "off"))
    if scale == "tiny":
        config = _tiny(config, row.data)
    return with_steps(config, steps or config.steps, scale)


def with_steps(config: TrainConfig, steps: int, scale: ScaleName) -> TrainConfig:
    """The settings with another number of steps; a short run validates, logs and saves at shares of it."""
    if scale == "full":
        return replace(config, steps=steps)
    validate, log, save = (max(1, steps // count) for count in (VALIDATIONS, LOGS, SAVES))
    return replace(config, steps=steps, validate_every=validate, log_every=log, save_every=save)


def _tiny(config: TrainConfig, data: DataName) -> TrainConfig:
    model = config.model
    context = max(64, model.context // TINY_CONTEXT) if data == "text" else model.context
    small = replace(
        model, layers=max(2, model.layers // TINY_DEPTH), width=TINY_WIDTH, heads=TINY_HEADS, context=context,
        precision="float32",
    )  # fmt: skip
    return replace(config, model=small, batch=1, steps=TINY_STEPS, validate_bytes=context)


def min_contexts(experiment: Experiment, row: Row, context: int) -> list[int]:
    """The least contexts at which a network of this context is scored: the same fractions of it as in the experiment."""
    own = train_preset(row.preset, model=dict(row.model)).model.context
    return [least * context // own for least in experiment.min_contexts]


def train_command(preset: str, config: TrainConfig) -> str:
    """The command of `longstride train` that has these settings."""
    words = ["longstride", "train", preset, *_flags("", train_preset(preset), config)]
    return shlex.join(words)


def _flags(prefix: str, before: Any, now: Any) -> list[str]:
    words = []
    for one in fields(now):
        old, new, name = getattr(before, one.name), getattr(now, one.name), one.name.replace("_", "-")
        if one.name in ("model", "optimizer"):
            words += _flags(f"{one.name}.", old, new)
        elif isinstance(new, bool) and old != new:
            words.append(f"--{prefix}{'' if new else 'no-'}{name}")
        elif old != new:
            words += [f"--{prefix}{name}", str(new)]
    return words
