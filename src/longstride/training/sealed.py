"""Folders that say what is in them: manifest.json has the size and the SHA-256 of every file, and is written last.

One that was not finished has no manifest. A bit that flipped in any file, the manifest too, is found.
"""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from longstride.common.atomic import atomic_path, sync
from longstride.common.files import parse_object, read_text

MANIFEST = "manifest.json"
VERSION = 1


class UnfinishedError(ValueError):
    """A folder whose writer was stopped."""


class DamagedError(ValueError):
    """A folder that no longer is what was written."""


def seal(folder: Path) -> None:
    """To be called when all files are there. When it returns they are on the disk, whatever happens to the machine."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        sync(path)
        files[path.relative_to(folder).as_posix()] = _entry(path)
    for path in (path for path in folder.rglob("*") if path.is_dir()):
        sync(path)
    with atomic_path(folder / MANIFEST) as temporary:
        temporary.write_text(_render(files))
    sync(folder.parent)


def is_sealed(folder: Path) -> bool:
    """Whether it was finished; not, whether it still is what was written."""
    return os.path.lexists(folder / MANIFEST)


def check(folder: Path) -> None:
    """Raises UnfinishedError or DamagedError, which name the folder and what is wrong with it."""
    try:
        text = read_text(folder / MANIFEST)
    except FileNotFoundError:
        raise UnfinishedError(f"{folder} is unfinished: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} is damaged: {MANIFEST} cannot be read: {error}") from None
    files = _parse(folder, text)
    there = _names(folder) - {MANIFEST}
    for name in sorted(there | files.keys()):
        if name not in there:
            raise DamagedError(f"{folder} is damaged: {name} is missing")
        if name not in files:
            raise DamagedError(f"{folder} is damaged: {name} is not in its {MANIFEST}")
        try:
            found = _entry(folder / name)
        except OSError as error:
            raise DamagedError(f"{folder} is damaged: {name} cannot be read: {error}") from None
        if found != files[name]:
            raise DamagedError(f"{folder} is damaged: {name} has other bytes than its {MANIFEST} says")


def _names(folder: Path) -> set[str]:
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise DamagedError(f"{folder} is damaged: {name} cannot be read: {error}") from None
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DamagedError(f"{folder} is damaged: {name} is a link, or no regular file")
        if stat.S_ISREG(mode):
            found.add(name)
    return found


def _parse(folder: Path, text: str) -> dict[str, Any]:
    try:
        content = parse_object(text, MANIFEST)
        version, files = content["version"], content["files"]
        whole = version == VERSION and isinstance(files, dict) and _render(files) == text
    except (ValueError, LookupError):
        whole, version = False, VERSION
    if not whole:
        known = f"version {version!r} is not known" if version != VERSION else "it is not as it was written"
        raise DamagedError(f"{folder} is damaged: {MANIFEST}: {known}")
    return dict(files)


def _render(files: dict[str, Any]) -> str:
    return json.dumps({"version": VERSION, "files": files}, indent=2, sort_keys=True) + "\n"


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
