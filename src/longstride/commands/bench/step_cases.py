"""Cases of `longstride bench step`: a preset and the fields that differ, as text. Imported without torch."""

from dataclasses import dataclass, fields
from typing import Any

from longstride.commands.bench.checks import check_distinct, check_files
from longstride.commands.bench.settings import StepBenchmark
from longstride.common.checks import short_repr, suggest, whole_number
from longstride.model.config import ModelConfig
from longstride.model.presets import DENSE
from longstride.model.recompute import AUTO
from longstride.training.config import TrainConfig
from longstride.training.presets import train_preset

STRIDED = "enwik8 pattern=interleave(strided(128))"
PAPER = ("enwik8", "enwik8-dense", STRIDED, "cifar10", "cifar10-dense", "imagenet64", "imagenet64-dense")
SMALL = ("audio-small", "audio-small-dense", "image-small", "image-small-dense")
BATCHES = {"enwik8": 8, "cifar10": 16, "imagenet64": 4}
"""Sequences per step that fit into 80 GB without recomputation."""
LAST_STEP = 10**6
"""Steps of the run that the timed steps are the first of."""


@dataclass(frozen=True)
class Case:
    text: str
    network: str
    """The text without the pattern: cases that differ in it alone share the network that they are compared with."""
    config: TrainConfig


def check_step(settings: StepBenchmark, on_gpu: bool = True) -> list[Case]:
    """Validates the settings and returns the cases to measure: none if results are read from a file."""
    check_files("bench step", settings)
    if settings.read is not None:
        return []
    for name in ("steps", "rounds"):
        whole_number("bench step", name, getattr(settings, name), least=1)
    texts = settings.cases or (PAPER if on_gpu else SMALL)
    check_distinct("bench step", "cases", texts)
    return [read_case(text, settings, compiled=on_gpu and not settings.eager) for text in texts]


def read_case(text: str, settings: StepBenchmark, compiled: bool) -> Case:
    """Returns the case of a text such as 'enwik8 optimizer=muon dropout=0.4'."""
    name, *words = text.split() or [""]
    plain = name.removesuffix(DENSE)
    given: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(
                f"bench step: cases has {short_repr(text)}, where {short_repr(word)} is not of the form field=value"
            )
        given[field] = value
    batch = settings.batch if settings.batch is not None else BATCHES.get(plain)
    defaults = {
        "batch": batch,
        "optimizer": settings.optimizer,
        "dropout": settings.dropout,
        "recompute": settings.recompute,
    }
    chosen: dict[str, Any] = {field: value for field, value in defaults.items() if value is not None} | given
    changes: dict[str, Any] = {"compile": compiled, "steps": LAST_STEP, "accumulate": 1, "model": {}}
    for field, value in chosen.items():
        if field == "optimizer":
            changes["optimizer"] = {"name": value}
        elif field in ("batch", "accumulate"):
            changes[field] = _number(text, field, value, int)
        else:
            changes["model"][field] = _model_value(text, field, value)
    try:
        config = train_preset(name, **changes)
    except ValueError as error:
        raise ValueError(f"bench step: cases has {short_repr(text)}: {error}") from None
    if config.model.recompute == AUTO:
        raise ValueError(
            f"bench step: cases has {short_repr(text)}: recompute = 'auto' is chosen by longstride train; give what "
            "longstride plan prints"
        )
    network = " ".join([plain, *(word for word in words if not word.startswith("pattern="))])
    return Case(text, network, config)


def _model_value(text: str, field: str, value: Any) -> Any:
    """Returns the value of a field of ModelConfig in the type that it has there."""
    types = {one.name: one.type for one in fields(ModelConfig)}
    if field not in types:
        known = [*types, "batch", "accumulate", "optimizer"]
        raise ValueError(f"bench step: cases has {short_repr(text)}: there is no field {field!r}; {suggest(field, known)}")
    kind = types[field]
    if kind in (int, float):
        return _number(text, field, value, kind)
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(
                f"bench step: cases has {short_repr(text)}: {field} must be true or false, got {short_repr(value)}"
            )
        return value.lower() == "true"
    return value


def _number(text: str, field: str, value: Any, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(
            f"bench step: cases has {short_repr(text)}: {field} must be a number, got {short_repr(value)}"
        ) from None
