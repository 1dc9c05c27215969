"""What the page says about a model: its data, its config in words, its card, its run's curve, and bundled samples to try."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from longstride.data import samples
from longstride.data.audio import RATE
from longstride.data.kind import DataKind
from longstride.data.plan import Bytes
from longstride.model import ModelConfig
from longstride.model.card import Card
from longstride.pictures.run_table import read_settings, summarize
from longstride.training.metrics import NAME, Row, read_metrics

MOST_POINTS = 1000
"""The most points of a curve."""
SETTINGS = ("bytes", "steps", "optimizer", "warm-up", "decay, clip", "average", "seed")
"""Of the run's settings, those that are shown. Others name files."""
EXCERPTS = 4
EXCERPT_BYTES = 1024
"""Of text, at most; at most half of the context too, so that there is room to go on."""
PATCHES = 16
PATCH = (32, 32, 3)
LEAST_CONTRAST = 50
"""The least standard deviation of the images that are shown: sky is dull."""
SOUND_SECONDS = 1.0
"""Of a sample of sound; at most half of the context."""


def describe_model(name: str, config: ModelConfig, kind: DataKind, card: Card | None, folder: Path | None) -> dict[str, Any]:
    """Returns everything but the samples. `folder`: of the run, whose curve is shown."""
    return {
        "name": name,
        "kind": kind.name,
        "item": list(kind.item),
        "rate": kind.rate,
        "context": config.context,
        "layers": config.layers,
        "heads": config.heads,
        "columns": matrix_columns(config),
        "patterns": [[pattern.text for pattern in heads] for heads in config.cycle],
        "config": config_in_words(config),
        "card": None if card is None else asdict(card),
        "run": None if folder is None else describe_run(folder),
    }


def matrix_columns(config: ModelConfig) -> int:
    """Row length of the matrix that shows the positions: the stride, with which patterns are periodic."""
    sizes = config.positions.sizes
    return config.period if not sizes else sizes[1] * sizes[2] if len(sizes) == 3 else sizes[1]


def config_in_words(config: ModelConfig) -> list[tuple[str, str]]:
    position = "row, column and channel of an image" if len(config.positions.sizes) == 3 else "row and column of a matrix"
    words = [
        ("Parameters", f"{config.parameters:,}"),
        ("Network", f"{config.layers} layers of width {config.width:,}, {config.heads} heads each"),
        ("Context", f"{config.context:,} bytes"),
        ("Pattern", config.pattern),
        ("Positions", f"{config.embedding}: {'queries and keys are rotated' if config.is_rotary else position}"),
        ("Feed-forward", f"{config.ff_width:,} wide"),
        ("Norm", "root mean square" if config.norm == "rms" else "layer normalization"),
        ("Precision", config.precision),
    ]
    if config.last_bytes > 1:
        words.insert(5, ("Embedding", f"of the last {config.last_bytes} bytes, summed"))
    return words


def describe_run(folder: Path) -> dict[str, Any] | None:
    """Returns the curve of a run and its results in words; None if the folder has no metrics."""
    if not (folder / NAME).is_file():
        return None
    try:
        rows, settings = read_metrics(folder), read_settings(folder)
    except (ValueError, OSError):  # The message names the path, which is nobody's business.
        return {"training": [], "validation": [], "summary": [], "note": "The run's files are damaged."}
    return {
        "training": curve_points(rows, "bits_per_byte"),
        "validation": curve_points(rows, "valid_bits_per_byte"),
        "summary": [*summarize(rows).items(), *((name, settings[name]) for name in SETTINGS if name in settings)],
        "note": "",
    }


def curve_points(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Returns step and value of a metric where it was logged; every few of them if they are many."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None and isfinite(row[name])]
    every = -(-len(points) // MOST_POINTS) or 1
    return points[::-every][::-1]


def bundled_samples(config: ModelConfig, kind: DataKind) -> list[dict[str, Any]]:
    """Returns pieces of the bundled data of this kind: a name, the bytes, and the shape of an image."""
    if kind.name == "images":
        lively = (image for image in samples.patches() if image.std() >= LEAST_CONTRAST)
        return [
            {"name": f"image {number}", "item": list(PATCH), "bytes": image.ravel().tolist()}
            for number, image in enumerate(islice(lively, PATCHES), 1)
        ]
    if kind.name == "audio":
        return _excerpts(samples.piano(), min(int(SOUND_SECONDS * RATE), max(1, config.context // 2)), _piano_starts())
    text = samples.unseen_text()
    return _excerpts(text, min(EXCERPT_BYTES, max(1, config.context // 2)), _articles(text.tobytes()))


def _excerpts(data: Bytes, size: int, starts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "item": [], "bytes": data[start : start + size].tolist()} for name, start in starts.items()]


def _piano_starts() -> dict[str, int]:
    every = range(0, len(samples.piano()), len(samples.piano()) // EXCERPTS)
    return {f"piano, from {start / RATE:.1f} s": start for start in every}


def _articles(text: bytes) -> dict[str, int]:
    """Returns where the texts of some articles begin, by their titles."""
    pattern = rb'<title>([^<]*)</title>(?:(?!<title>).)*?<text xml:space="preserve">(?!#redirect)'
    found = islice(re.finditer(pattern, text, re.DOTALL | re.IGNORECASE), EXCERPTS)
    return {match[1].decode("utf-8", "replace"): match.end() for match in found}
