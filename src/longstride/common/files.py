"""Reading of untrusted files: regular files only, of limited size, and JSON of limited depth.

Opening a FIFO may block for ever, reading a device may never end, and a link may lead out of the run's folder.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

LARGEST_JSON = 2**24
"""The most bytes of a JSON file."""
LEVELS = 32
"""The deepest nesting of lists and objects in a JSON file."""
CONTAINERS = 100_000
"""The most lists and objects in a JSON file: each takes far more memory than its two bytes of text."""
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string in JSON, or one that does not end."""

DEEPEST = 64
"""The most levels of folders inside each other."""
LOCK_NAME = ".lock"
RUN_SUFFIXES = (".json", ".jsonl", ".safetensors", ".txt", ".png", ".wav")
"""Suffixes of files that a run writes."""
RUN_TREES = ("checkpoints", "tensorboard")
"""Subfolders that a run writes into."""


def real_path(path: str | Path) -> Path:
    """Returns the path with all links resolved. Unlike `Path.resolve`, a loop of links raises no error; opening it does."""
    return Path(os.path.realpath(path))


def walk(folder: Path) -> Iterator[Path]:
    """Yields everything below a folder, without following links. Folders that vanish meanwhile are skipped. ValueError if
    folders are nested deeper than DEEPEST, at which the functions of the standard library fail."""
    level = [folder]
    for _ in range(DEEPEST):
        inner = []
        for above in level:
            vanished = () if above == folder else (FileNotFoundError, NotADirectoryError)
            with suppress(PermissionError, *vanished), os.scandir(above) as entries:
                for entry in entries:
                    yield above / entry.name
                    if entry.is_dir(follow_symlinks=False):
                        inner.append(above / entry.name)
        if not inner:
            return
        level = inner
    raise ValueError(f"{folder} has folders inside each other, more than {DEEPEST} levels deep; move its files up")


def read_text(path: str | Path, most: int = LARGEST_JSON) -> str:
    """Returns the UTF-8 text of a regular file, or of a link to one. Refuses other files and more than `most` bytes."""
    with os.fdopen(open_regular(Path(path), os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has {max(size, len(content)):,} bytes; at most {most:,} are read of such a file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def file_sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file's bytes, as hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: str | Path, finite: bool = True) -> dict[str, Any]:
    """Returns the object in a JSON file. `finite`: refuse numbers such as NaN or 1e999."""
    return parse_object(read_text(path), str(path), finite)


def parse_object(text: str, owner: str, finite: bool = True) -> dict[str, Any]:
    """Parses `text` as a JSON object. Every failure is a ValueError; `owner` names the file in it."""
    try:
        if len(text) > LARGEST_JSON:
            raise ValueError(f"it has {len(text):,} characters; at most {LARGEST_JSON:,} are read")
        containers = _count_opened(text)
        if containers > CONTAINERS:
            containers = _count_opened(STRING.sub("", text))
        if containers > CONTAINERS:
            raise ValueError(f"it has more than {CONTAINERS:,} lists and objects")
        hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
        content = json.loads(text, **hooks)
        if containers > LEVELS and not _is_shallow(content):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{owner} is not JSON as this package writes it: more than {LEVELS} levels are nested") from None
    except ValueError as error:
        raise ValueError(f"{owner} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{owner} must hold a JSON object, got {_json_type(content)}")
    return content


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file, or a link to one, and returns the descriptor. Refuses anything else."""
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ValueError(f"{path} is {_file_type(mode)}, and no regular file")
    return handle


def open_inside(path: Path, flags: int) -> int:
    """Opens a regular file without other names, and returns the descriptor. Refuses symbolic and hard links."""
    try:
        handle = open_regular(path, flags | os.O_NOFOLLOW)
    except OSError:
        if path.is_symlink():
            raise ValueError(_refusal(path, "is a link")) from None
        raise
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise ValueError(_refusal(path, "is a hard link, and has another name elsewhere"))
    return handle


def check_source(source: str | Path) -> Path:
    """Returns the path of a file or folder of data, with ~ expanded; ValueError if it cannot be read."""
    source = Path(source).expanduser()
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a file or a folder")
    if not source.is_file() and not source.is_dir():
        raise ValueError(f"{source} is no file and no folder")
    if not os.access(source, os.R_OK):
        raise ValueError(f"{source} cannot be read: permission denied")
    return source


def check_run_folder(owner: str, folder: Path) -> None:
    """Refuses a run's folder that holds anything but regular files and folders: through a link, a write or removal would
    reach files elsewhere. The folder itself may be a link. Call this before anything is written."""
    if os.path.lexists(folder) and not folder.is_dir():
        kind = "a file" if folder.exists() else "a link that leads nowhere"
        raise ValueError(f"{owner}: {folder} is {kind}; give the folder of a run")
    if folder.is_dir():
        for path in _entries(folder):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # Removed meanwhile, as a run in progress does with its checkpoints.
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ValueError(f"{owner}: {_refusal(path, f'is {_file_type(mode)}')}")
            if stat.S_ISDIR(mode) and (path.name == LOCK_NAME or path.suffix in RUN_SUFFIXES):
                raise ValueError(f"{owner}: {path} is a folder, and a run has a file of that name; remove it")
            if stat.S_ISREG(mode) and (path.name in RUN_TREES or path.name.startswith("step-")):
                raise ValueError(f"{owner}: {path} is a file, and a run has a folder of that name; remove it")


def _entries(folder: Path) -> Iterator[Path]:
    yield from folder.iterdir()
    for name in RUN_TREES:
        if (folder / name).is_dir():
            yield from walk(folder / name)


def _refusal(path: Path, why: str) -> str:
    return f"{path} {why}; a run holds only files and folders of its own, so remove it or replace it by a copy of its target"


def _file_type(mode: int) -> str:
    types = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return types.get(stat.S_IFMT(mode), "a device")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _count_opened(text: str) -> int:
    return text.count("[") + text.count("{")


def _is_shallow(content: Any) -> bool:
    level = [content] if type(content) in (dict, list) else []
    for _ in range(LEVELS):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return True
    return False


def _json_type(value: object) -> str:
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
