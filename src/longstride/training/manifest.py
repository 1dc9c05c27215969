"""Manifest of a checkpoint's folder: the size and the SHA-256 of every file. It is written last.

An unfinished folder has no manifest. A changed bit in any file, also in the manifest, is detected.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from longstride.common.atomic import atomic_path, sync
from longstride.common.files import file_sha256, parse_object, read_text, walk

MANIFEST = "manifest.json"
VERSION = 1


class UnfinishedError(ValueError):
    """A folder whose writer was stopped before it finished."""


class DamagedError(ValueError):
    """A folder whose content differs from what was written."""


def write_manifest(folder: Path) -> None:
    """Writes the manifest. Call it when all files are written; when it returns, they are flushed to the disk."""
    files = {}
    for path in sorted(path for path in walk(folder) if path.is_file() and path != folder / MANIFEST):
        sync(path)
        files[path.relative_to(folder).as_posix()] = _entry(path)
    for path in (path for path in walk(folder) if path.is_dir()):
        sync(path)
    with atomic_path(folder / MANIFEST) as temporary:
        temporary.write_text(_render(files))
    sync(folder.parent)


def has_manifest(folder: Path) -> bool:
    """Whether the folder was finished. Does not check its content."""
    return os.path.lexists(folder / MANIFEST)


def check_manifest(folder: Path) -> None:
    """Raises UnfinishedError or DamagedError if the folder does not match its manifest."""
    try:
        text = read_text(folder / MANIFEST)
    except FileNotFoundError:
        raise UnfinishedError(f"{folder} is unfinished: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged: {MANIFEST} cannot be read: {error}") from None
    files = _parse(folder, text)
    names = _file_names(folder) - {MANIFEST}
    for name in sorted(names | files.keys()):
        if name not in names:
            raise DamagedError(f"{folder} is damaged: {name} is missing")
        if name not in files:
            raise DamagedError(f"{folder} is damaged: {name} is not in its {MANIFEST}")
        try:
            entry = _entry(folder / name)
        except OSError as error:
            raise DamagedError(f"{folder} is damaged: {name} cannot be read: {error}") from None
        if entry != files[name]:
            raise DamagedError(f"{folder} is damaged: {name} has other bytes than its {MANIFEST} says")


def _file_names(folder: Path) -> set[str]:
    names = set()
    try:
        paths = list(walk(folder))
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged: {error}") from None
    for path in paths:
        name = path.relative_to(folder).as_posix()
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise DamagedError(f"{folder} is damaged: {name} cannot be read: {error}") from None
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DamagedError(f"{folder} is damaged: {name} is a link, or no regular file")
        if stat.S_ISREG(mode):
            names.add(name)
    return names


def _parse(folder: Path, text: str) -> dict[str, Any]:
    try:
        content = parse_object(text, MANIFEST)
        version, files = content["version"], content["files"]
        intact = version == VERSION and isinstance(files, dict) and _render(files) == text
    except (ValueError, LookupError):
        intact, version = False, VERSION
    if not intact:
        problem = f"version {version!r} is not known" if version != VERSION else "it is not as it was written"
        raise DamagedError(f"{folder} is damaged: {MANIFEST}: {problem}")
    return dict(files)


def _render(files: dict[str, Any]) -> str:
    return json.dumps({"version": VERSION, "files": files}, indent=2, sort_keys=True) + "\n"


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
