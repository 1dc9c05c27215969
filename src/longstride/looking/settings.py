"""What a run is and what came of it, as lines for a person: the settings on its page."""

import json
from pathlib import Path
from typing import Any

from longstride.checks import read_config_text
from longstride.model.cost import parameter_count
from longstride.training.config import TrainConfig
from longstride.training.curve import Rows

Settings = dict[str, str]


def settings(folder: Path) -> Settings:
    """From config.json and data.json, each if it is there."""
    found: Settings = {}
    path = folder / "config.json"
    if path.is_file():
        config = TrainConfig.from_json(read_config_text(path), str(path))
        found |= _model(config) | {"data": Path(config.data).name}
    found |= _data(folder / "data.json")
    if path.is_file():
        found |= _training(config)
    return found


def results(rows: Rows) -> Settings:
    """From the metrics."""
    found: Settings = {}
    validated = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    if validated:
        best = min(validated, key=lambda row: float(row["valid_bits_per_byte"]))
        found["best validation"] = f"{best['valid_bits_per_byte']:.4f} bits per byte, at step {best['step']:,}"
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    if trained:
        found["training"] = f"{trained[-1]['bits_per_byte']:.4f} bits per byte, at step {trained[-1]['step']:,}"
    seconds = _seconds(rows)
    if seconds:
        found["time in steps"] = in_words(seconds)
    speeds = [row["bytes_per_second"] for row in rows if row.get("bytes_per_second")]
    if speeds:
        found["speed"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f} bytes/s"
    memory = [row["memory_gib"] for row in rows if row.get("memory_gib")]
    if memory:
        found["memory"] = f"{max(memory):.1f} GiB"
    return found


def in_words(seconds: float) -> str:
    whole = round(seconds)
    parts = [(whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or f"{seconds:.1f} s"


def _seconds(rows: Rows) -> float:
    total, before = 0.0, 0
    for row in rows:
        total += (row["step"] - before) * (row.get("seconds_per_step") or 0.0)
        before = row["step"]
    return total


def _model(config: TrainConfig) -> Settings:
    model = config.model
    found = {
        "parameters": f"{parameter_count(model):,}",
        "layers": f"{model.layers} of width {model.width}, {model.heads} heads",
        "context": f"{model.context:,} bytes",
        "pattern": model.pattern,
        "embedding": model.embedding,
        "precision": model.precision,
    }
    for name, plain in (("dropout", 0.0), ("qk_ratio", 1.0), ("ff_ratio", 4.0), ("recompute", "off")):
        if getattr(model, name) != plain:
            found[name.replace("_", " ")] = f"{getattr(model, name)}"
    return found


def _data(path: Path) -> Settings:
    try:
        given: Any = json.loads(path.read_text()) if path.is_file() else {}
        sizes = ", ".join(f"{name} {entry['bytes']:,}" for name, entry in given.get("splits", {}).items())
        return {"kind": str(given["kind"]), "bytes": sizes} if given else {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"plot run: {path} is damaged: {error}; remove it, and the page is drawn without it") from None


def _training(config: TrainConfig) -> Settings:
    optimizer = config.optimizer
    parts = f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    found = {
        "steps": f"{config.steps:,} of batch {config.batch}{parts}",
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}",
        "warm-up": f"{optimizer.warmup:,} steps",
        "decay, clip": f"{optimizer.decay:g}, {optimizer.clip:g}",
        "seed": str(config.seed),
    }
    return found | ({"average": f"{config.ema:g}"} if config.ema else {})
