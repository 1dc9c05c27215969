"""Writes the weights of a run as a saved model with a card: longstride export RUN FOLDER"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstride.common.atomic import atomic_path
from longstride.common.checks import suggest
from longstride.common.files import file_sha256, read_json
from longstride.data.store import read_manifest
from longstride.model import SparseTransformer
from longstride.model.card import SETTINGS, Card, Figure, write_card
from longstride.sampling.data_kind import find_data_kind
from longstride.training.config import TrainConfig
from longstride.training.run import WEIGHTS, Run
from longstride.training.source import Source, open_source

OWNER = "export"
FILES = (WEIGHTS, "config.json", SETTINGS, "card.json", "README.md")
FORMATS = ("longstride", "transformers")
MORE_FILES = ("longstride_code.py", "tokenizer_config.json")
"""What a folder for transformers has, too."""


def export(
    given: Path,
    folder: Path,
    dtype: str = "float16",
    precision: str | None = None,
    checkpoint: str | None = None,
    results: Sequence[Path] = (),
    force: bool = False,
    format: str = "longstride",
) -> Card:
    """Writes config.json, model.safetensors, train.json, card.json and README.md, and returns the card.

    `results`: files of `longstride eval --json` for the card; by default those in the run that are about these weights.
    `format`: of FORMATS. "transformers" adds what its Auto classes need; longstride reads both.
    """
    if format not in FORMATS:
        raise ValueError(f"{OWNER}: format = {format!r} is unknown; {suggest(format, FORMATS)}")
    if format == "transformers" and importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{OWNER}: format = 'transformers' needs transformers: pip install 'longstride[transformers]'")
    source = open_source(OWNER, given, checkpoint)
    _check_target(folder, source, force)
    changes: dict[str, Any] = {"recompute": "off"} | ({"precision": precision} if precision else {})
    model = SparseTransformer.from_pretrained(source.weights, **changes)
    files = results or _own_results(source)
    figures = _on_most_bytes(files, model.config.precision)
    card = _card(folder.name, source, model, figures)
    model.save_pretrained(folder, dtype)
    settings = source.config or _saved_settings(source.weights / SETTINGS)
    if settings is not None:
        with atomic_path(folder / SETTINGS) as path:  # Its paths are those of one machine.
            path.write_text(replace(settings, data="", out="", init_from="").to_json())
    weights = folder / WEIGHTS
    card = replace(card, dtype=dtype, size=weights.stat().st_size, sha256=file_sha256(weights))
    write_card(folder, card, model.config)
    for name in MORE_FILES:
        (folder / name).unlink(missing_ok=True)
    if format == "transformers":
        from longstride.transformers.model import add_files

        add_files(folder, card, model.config)
    return card


def read_figures(path: Path, precision: str | None = None) -> list[Figure]:
    """Reads the rows of a results file of `longstride eval`. `precision`: the model's; rows in another one say so."""
    content = read_json(path)
    try:
        data, rows = content["data"], list(content["rows"])
        where, used = f"{Path(data['path']).name}, {data['split']}", content["model"]["precision"]
        where += f", in {used}" if precision not in (None, used) else ""
        return [Figure(where, row["bytes"], row["min_context"], row["bits_per_byte"]) for row in rows]
    except (LookupError, TypeError):
        raise ValueError(f"{OWNER}: {path} is no results file; longstride eval --json writes one") from None


def _on_most_bytes(files: Sequence[Path], precision: str) -> tuple[Figure, ...]:
    """Reads results files. Leaves out figures that others have on more bytes of the same data."""
    found = []
    for path in files:
        figures = read_figures(path, precision)
        sha256 = read_json(path)["data"].get("sha256")  # Other data may have the same name.
        found += [((sha256, figure.data, figure.min_context), figure) for figure in figures]
    most: dict[Any, int] = {}
    for key, figure in found:
        most[key] = max(figure.bytes, most.get(key, 0))
    return tuple(figure for key, figure in found if figure.bytes == most[key])


def _card(name: str, source: Source, model: SparseTransformer, figures: tuple[Figure, ...]) -> Card:
    if source.config is None:
        known = source.card or Card(name, "")
        return replace(known, name=name, parameters=model.parameter_count(), figures=figures or known.figures)
    manifest = source.folder / "data.json"
    store = read_manifest(source.folder, manifest) if manifest.is_file() else None
    data = Path(source.config.data).name
    best = Run(source.folder).best() or (0, None)
    step, bits = (int(source.checkpoint.removeprefix("step-")), None) if source.checkpoint else best
    if bits is not None and store and not figures:
        context = model.config.context
        scored = max(1, min(source.config.validate_bytes, store.splits["valid"]) // context) * context
        figures = (Figure(f"{data}, validation of the run", scored, 0, bits),)
    return Card(
        name=name,
        kind=find_data_kind(source, model.config, None).name,
        data=(store.source if store else "") or data,
        command=f"longstride train --config {SETTINGS} --data {data} --out RUN",
        steps=step,
        planned_steps=source.config.steps,
        parameters=model.parameter_count(),
        figures=figures,
    )


def _saved_settings(path: Path) -> TrainConfig | None:
    """The settings that a saved model was trained with, if they are beside it."""
    return TrainConfig.read(path) if path.is_file() else None


def _own_results(source: Source) -> list[Path]:
    """The results files in the run that are about these weights."""
    if source.config is None:
        return []
    digest = file_sha256(source.weights / WEIGHTS)
    return [path for path in sorted(source.folder.glob("eval-*.json")) if read_json(path).get("weights_sha256") == digest]


def _check_target(folder: Path, source: Source, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{OWNER}: {folder} is a file; give the folder that is to be made")
    if folder.is_dir() and folder.resolve() in (source.folder.resolve(), source.weights.resolve()):
        raise ValueError(f"{OWNER}: {folder} is what is exported; give another folder")
    others = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    strange = others - {*FILES, *MORE_FILES}
    if strange or (others and not force):
        hint = "give another" if strange else "add --force to replace the model in it, or give another"
        raise ValueError(f"{OWNER}: {folder} is not an empty folder; {hint}")
