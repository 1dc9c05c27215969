"""The user's own settings: a JSON file that `longstride bench tune` writes, and whose settings replace the shipped ones.

It is the file that the environment variable LONGSTRIDE_SETTINGS names (empty: none at all), or else
longstride/kernels.json in $XDG_CONFIG_HOME or ~/.config, if that exists. It is read once, when a kernel is first launched:

    {"NVIDIA H200": [{"kernel": "dq", "summary": true, "width": 64, "dtype": "bfloat16", "rows": 64, ...}, ...]}
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from longstride.attention.kernels.launches import Key, Setting, as_row, from_row
from longstride.common.atomic import atomic_path
from longstride.common.files import read_text

VARIABLE = "LONGSTRIDE_SETTINGS"
LONGEST_REASON = 300

ByGpu = dict[str, dict[Key, Setting]]
"""Settings by the GPU's name."""


def place() -> Path | None:
    """Where the file is, or would be; None if there is to be none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    # As the XDG specification has it, a relative path there does not count.
    home = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (home if home.is_absolute() else Path("~/.config").expanduser()) / "longstride" / "kernels.json"


@lru_cache(maxsize=1)
def in_force() -> ByGpu:
    """The settings of the file, read once in a process; `in_force.cache_clear()` has it read again."""
    path = place()
    if path is None:
        return {}
    if not path.exists():
        if VARIABLE in os.environ:
            raise ValueError(
                f"settings: {VARIABLE} = {str(path)!r} is not there; correct it, unset it, "
                "or make the file with: longstride bench tune"
            )
        return {}
    return read(path)


def read(path: Path) -> ByGpu:
    """The settings in a file, or an error that names the file, the place in it, the value and what would be right."""
    try:
        gpus = json.loads(read_text(path), object_pairs_hook=_without_repetition)
        if not isinstance(gpus, dict):
            raise ValueError(f"it must be an object with a list of settings for each GPU, got {_kind(gpus)}")
        return {name: _settings(name, rows) for name, rows in gpus.items()}
    except OSError as error:
        raise ValueError(f"settings: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"settings: in {str(path)!r}, {str(error)[:LONGEST_REASON]}; correct it, or delete the file and make a new one "
            "with: longstride bench tune"
        ) from None


def write(path: Path, gpus: Mapping[str, Mapping[Key, Setting]]) -> None:
    """Writes a file that `read` reads: a line for each setting."""
    blocks = []
    for name, settings in gpus.items():
        rows = [json.dumps(as_row(key, setting)) for key, setting in settings.items()]
        blocks.append(f"  {json.dumps(name)}: [\n    " + ",\n    ".join(rows) + "\n  ]")
    with atomic_path(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


def _settings(name: str, rows: Any) -> dict[Key, Setting]:
    if not isinstance(rows, list):
        raise ValueError(f"{name!r} must be a list of settings, got {_kind(rows)}")
    found: dict[Key, Setting] = {}
    for index, row in enumerate(rows):
        where = f"{name!r}[{index}]"
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object, got {_kind(row)}")
        try:
            key, setting = from_row(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if key in found:
            raise ValueError(f"{where} is for what an entry before it is for")
        found[key] = setting
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of two entries with one name Python would silently take the second."""
    for index, (name, _) in enumerate(pairs):
        if name in (other for other, _ in pairs[:index]):
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)


def _kind(value: object) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)
