"""The table of a run's page: its results and its settings, as names and values."""

from pathlib import Path
from typing import Any

from longstride.common.files import file_sha256, read_json
from longstride.training.config import TrainConfig
from longstride.training.curve import Rows
from longstride.training.optimizer import warmup_steps
from longstride.training.run import WEIGHTS

Settings = dict[str, str]
SPLITS = ("valid", "test")
LONGEST = 1000
"""The most characters of a value, before it is wrapped."""


def read_settings(folder: Path) -> Settings:
    """Returns a run's settings for the table, from config.json and data.json, if they exist."""
    values: Settings = {}
    path = folder / "config.json"
    if path.is_file():
        config = TrainConfig.read(path)
        values |= _model_settings(config) | {"data": Path(config.data).name}
    values |= _data_settings(folder / "data.json")
    if path.is_file():
        values |= _optimizer_settings(config)
    return {name: _shorten(value) for name, value in values.items()}


def summarize(rows: Rows) -> Settings:
    """Returns a run's results for the table, from its metrics."""
    values: Settings = {}
    validated = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    if validated:
        best = min(validated, key=lambda row: float(row["valid_bits_per_byte"]))
        values["best validation"] = f"{best['valid_bits_per_byte']:.4f} bits per byte, at step {best['step']:,}"
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    if trained:
        values["training"] = f"{trained[-1]['bits_per_byte']:.4f} bits per byte, at step {trained[-1]['step']:,}"
    seconds = _training_seconds(rows)
    if seconds:
        values["time in steps"] = duration_text(seconds)
    speeds = [row["bytes_per_second"] for row in rows if row.get("bytes_per_second")]
    if speeds:
        values["speed"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f} bytes/s"
    memory = [row["memory_gib"] for row in rows if row.get("memory_gib")]
    if memory:
        values["memory"] = f"{max(memory):.1f} GiB"
    return values


def read_scores(folder: Path) -> Settings:
    """Returns what `longstride eval` measured of the run's weights, for each split that it scored whole."""
    files = {f"eval {split}": path for split in SPLITS if (path := folder / f"eval-{split}.json").is_file()}
    if not files or not (folder / WEIGHTS).is_file():
        return {}
    digest = file_sha256(folder / WEIGHTS)
    values: Settings = {}
    for name, path in files.items():
        try:
            given: Any = read_json(path)
            if given.get("weights_sha256") != digest:
                continue
            rows = sorted((int(row["min_context"]), float(row["bits_per_byte"])) for row in given["rows"])
            (least, bits), *others = rows
            first = f"{bits:.4f} with min context {least:,}"
            values[name] = ", ".join([first, *(f"{bits:.4f} with {least:,}" for least, bits in others)])
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"plot run: {path} is damaged: {error}; remove it, and the page is drawn without it") from None
    return {name: _shorten(value) for name, value in values.items()}


def duration_text(seconds: float) -> str:
    """Formats seconds with their two largest units: "1 h 5 min"."""
    whole = round(seconds)
    parts = [(whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or f"{seconds:.1f} s"


def _training_seconds(rows: Rows) -> float:
    """Returns the seconds of all steps, without validations and checkpoints."""
    total, before = 0.0, 0
    for row in rows:
        total += (row["step"] - before) * (row.get("seconds_per_step") or 0.0)
        before = row["step"]
    return total


def _model_settings(config: TrainConfig) -> Settings:
    model = config.model
    values = {
        "parameters": f"{model.parameters:,}",
        "layers": f"{model.layers} of width {model.width}, {model.heads} heads",
        "context": f"{model.context:,} bytes",
        "pattern": model.pattern,
        "embedding": model.embedding,
        "precision": model.precision,
    }
    for name, default in (("dropout", 0.0), ("qk_ratio", 1.0), ("ff_ratio", 4.0), ("recompute", "off")):
        if getattr(model, name) != default:
            values[name.replace("_", " ")] = f"{getattr(model, name)}"
    return values


def _data_settings(path: Path) -> Settings:
    try:
        given: Any = read_json(path) if path.is_file() else {}
        sizes = ", ".join(f"{name} {entry['bytes']:,}" for name, entry in given.get("splits", {}).items())
        return {"kind": str(given["kind"]), "bytes": sizes} if given else {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"plot run: {path} is damaged: {error}; remove it, and the page is drawn without it") from None


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _optimizer_settings(config: TrainConfig) -> Settings:
    optimizer = config.optimizer
    warmup = warmup_steps(optimizer, config.steps)
    shorter = f", not {optimizer.warmup:,}: at most a tenth of the run" if warmup < optimizer.warmup else ""
    parts = f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    values = {
        "steps": f"{config.steps:,} of batch {config.batch}{parts}",
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}",
        "warm-up": f"{warmup:,} step{'' if warmup == 1 else 's'}{shorter}",
        "decay, clip": f"{optimizer.decay:g}, {optimizer.clip:g}".replace("inf", "none"),
        "seed": str(config.seed),
    }
    return values | ({"average": f"{config.ema:g}"} if config.ema else {})
