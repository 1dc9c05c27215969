"""Validation of the benchmarks' settings, and the shapes of the paper's data sets. Imported without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.commands.bench.settings import AttentionBenchmark, Benchmark, SamplingBenchmark
from longstride.common.atomic import check_output
from longstride.common.checks import whole_number
from longstride.common.figures import picture_path
from longstride.model.config import ModelConfig
from longstride.model.presets import preset
from longstride.patterns.notation import parse

ALL = "all"


@dataclass(frozen=True)
class Shape:
    """Sizes and patterns that are measured together. `name` is a data set of the paper, or the length."""

    name: str
    batch: int
    heads: int
    n: int
    d_qk: int
    d_v: int
    patterns: tuple[str, ...]


def _paper(name: str, batch: int, heads: int, n: int, d_qk: int, d_v: int, l: int, c: int) -> Shape:
    merged = (f"merged(strided({l}))", f"merged(fixed({l}, {c}))", f"merged(fixed({l}, 8))")
    return Shape(name, batch, heads, n, d_qk, d_v, (*dict.fromkeys(merged), f"local({l})", f"column({l})", f"block({l})"))


SHAPES = {
    shape.name: shape
    for shape in (
        _paper("enwik8", 8, 8, 12_288, 64, 64, l=128, c=32),
        _paper("imagenet64", 8, 16, 12_288, 32, 32, l=128, c=8),
        _paper("cifar10", 32, 2, 3_072, 64, 128, l=96, c=8),
        _paper("music-65536", 1, 16, 65_536, 32, 32, l=256, c=8),
        _paper("music-262144", 1, 8, 262_144, 32, 32, l=512, c=8),
        _paper("music-1048576", 1, 1, 1_048_576, 64, 64, l=1024, c=8),
    )
}


def shape_name(n: int) -> str:
    """The shape's name where only n changes from row to row."""
    return f"n = {n:,}"


def check_attention(settings: AttentionBenchmark) -> list[Shape]:
    """Validates the settings and returns the shapes to measure: none if results are read from a file."""
    check_files("bench attention", settings)
    if settings.read is not None:
        return []
    for name in ("batch", "heads", "d_qk", "d_v", "repeats"):
        whole_number("bench attention", name, getattr(settings, name), least=1)
    for name in ("lengths", "patterns"):
        check_distinct("bench attention", name, getattr(settings, name))
    for n in settings.lengths:
        whole_number("bench attention", "lengths", n, least=1)
    for text in settings.patterns:
        heads = parse(text)
        if len(heads) != 1:
            raise ValueError(
                f"bench attention: patterns has {text!r}, which is {len(heads)} heads; write 'merged({text})' for one head "
                "that sees what they see"
            )
    for shape in settings.shapes:
        if shape not in SHAPES:
            raise ValueError(f"bench attention: shapes has {shape!r}; the names are {', '.join(SHAPES)}")
    measured = settings.shapes or tuple(str(n) for n in settings.lengths)
    for shape in settings.compile:
        if shape not in (*measured, ALL):
            raise ValueError(
                f"bench attention: compile has {shape!r}, which is not measured; give {', '.join(measured)} or all"
            )
    if settings.shapes:
        return [SHAPES[name] for name in settings.shapes]
    return [
        Shape(shape_name(n), settings.batch, settings.heads, n, settings.d_qk, settings.d_v, settings.patterns)
        for n in settings.lengths
    ]


def check_sampling(settings: SamplingBenchmark) -> ModelConfig:
    """Validates the settings and returns the network's config."""
    config = preset(settings.preset)
    for name, least in (("batches", 1), ("positions", 0)):
        given = getattr(settings, name)
        check_distinct("bench sampling", name, given)
        whole_number("bench sampling", name, min(given), least)
    most = config.context - 2  # One byte more, from which on time counts, and one that is timed.
    if max(settings.positions) > most:
        raise ValueError(
            f"bench sampling: positions has {max(settings.positions):,}, and the context of {settings.preset} is "
            f"{config.context:,}; give at most {most:,}"
        )
    for name, number in (("bytes", settings.bytes), ("repeats", settings.repeats)):
        if number is not None:
            whole_number("bench sampling", name, number, least=1)
    check_files("bench sampling", settings)
    return config


def check_distinct(owner: str, name: str, values: Sequence[Any]) -> None:
    """Refuses an empty list and one that has a value twice."""
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{owner}: {name} must be one or more different ones, got {list(values)}")


def check_files(owner: str, settings: Benchmark) -> None:
    """Refuses files that exist, unless `force` is set, and those that cannot be written, before any time is spent."""
    if settings.picture is not None:
        picture_path(owner, settings.picture)
    for name, path in (("json", settings.json), ("picture", settings.picture)):
        if path is not None:
            check_output(owner, name, Path(path), may_replace=settings.force)
