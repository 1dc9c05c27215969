"""The config.json of a run, a checkpoint or a saved model: where it is, and the model that it describes.

Imported without torch, so that a wrong path is refused at once.
"""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from longstride.common.checks import suggest
from longstride.common.files import read_json, real_path
from longstride.model.config import ModelConfig
from longstride.model.presets import DENSE, PRESETS, preset
from longstride.model.shipped import NAMES, find_model, why_absent

MODEL_TYPE = "longstride"
"""What a config.json that transformers reads, too, has as its model_type."""


def find_settings(owner: str, folder: Path) -> Path:
    """Returns the path of the config.json of a run, a checkpoint or a saved model, or of a model that comes with longstride;
    ValueError if there is none."""
    path = settings_path(find_model(folder))
    if not path.is_file():
        place, why = path.parent, "there is no such folder"
        if not place.exists() and str(place) in NAMES:
            raise ValueError(f"{owner}: {place} is not here: {why_absent(str(place))}")
        if place.is_dir():
            why = "it has no config.json"
        elif place.exists():
            why = "it is a file, and they are folders"
        elif (hint := suggest(str(place), NAMES)).endswith("?"):
            why += f"; {hint}"
        raise ValueError(f"{owner}: {place} is no run and no saved model: {why}")
    return path


def settings_path(folder: Path) -> Path:
    """Returns the path of a model's config.json: in its folder, or in the run that a checkpoint belongs to."""
    settings = folder / "config.json"
    if not settings.is_file():
        for parent in (folder.parent, real_path(folder).parent):
            if parent.name == "checkpoints":  # A run has one config.json for all its checkpoints.
                return parent.parent / "config.json"
    return settings


def read_config(path: Path) -> ModelConfig:
    """Reads the model config from the config.json of a saved model or of a run."""
    content = read_content(path)
    if isinstance(content.get("model"), dict):
        return ModelConfig.from_fields(content["model"], f"{path}: model")
    return ModelConfig.from_fields(content, str(path))


def read_content(path: Path) -> dict[str, Any]:
    """Returns the content of the config.json of a run or a saved model; ValueError with a remedy for any other file. The
    fields may still have wrong values."""
    try:
        content = read_json(path, finite=False)
    except ValueError as error:
        raise ValueError(f"{error}; bring the file back from a copy, or give another folder") from None
    required = [field.name for field in fields(ModelConfig) if field.default is MISSING]
    if not isinstance(content.get("model"), dict) and not any(name in content for name in required):
        raise ValueError(
            f"{path} describes no run and no saved model; give another folder, or bring their file back from a copy"
        )
    return content


def is_run(content: dict[str, Any]) -> bool:
    """Whether the content of a config.json is that of a run. A folder for transformers has its model in "model", too."""
    return isinstance(content.get("model"), dict) and content.get("model_type") != MODEL_TYPE


def find_config(owner: str, name: str) -> ModelConfig:
    """The config of a run, a saved model, a model that comes with longstride, or a preset. A folder with a config precedes
    a model or a preset of the same name."""
    folder, is_preset = Path(name), name.removesuffix(DENSE) in PRESETS
    if settings_path(folder).is_file() or name in NAMES or (folder.exists() and not is_preset):
        return read_config(find_settings(owner, folder))
    try:
        return preset(name)
    except ValueError as error:
        raise ValueError(f"{owner}: there is no folder {name!r}, and {error}") from None
