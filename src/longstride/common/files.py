"""Files that somebody else may have written: regular files only, of limited size, and JSON of limited depth.

A FIFO would be waited for without end, a device has no end, and a link leads to a file that is not ours.
"""

import json
import os
import stat
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

LARGEST_JSON = 2**24
"""Bytes of a JSON file."""
LEVELS = 32
"""Lists and objects inside each other."""
CONTAINERS = 100_000
"""Lists and objects of a file: each takes far more memory than its two bytes of text."""

RUN_TREES = ("checkpoints", "tensorboard")
"""Folders of a run that it writes into."""


def real_path(path: str | Path) -> Path:
    """The path without links. A loop of links is no error here, as it is in `Path.resolve`: opening it is."""
    return Path(os.path.realpath(path))


def read_text(path: str | Path, most: int = LARGEST_JSON) -> str:
    """The UTF-8 text of a regular file, or of a link to one. Others, and those of more than `most` bytes, are refused."""
    with os.fdopen(open_regular(Path(path), os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has {max(size, len(content)):,} bytes; at most {most:,} are read of such a file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: str | Path, finite: bool = True) -> dict[str, Any]:
    """The object in a JSON file. `finite`: a number that is not, such as NaN or 1e999, is refused."""
    return parse_object(read_text(path), str(path), finite)


def parse_object(text: str, owner: str, finite: bool = True) -> dict[str, Any]:
    """The object that `text` is in JSON. `owner` names the file in errors, which are ValueError only."""
    try:
        if len(text) > LARGEST_JSON:
            raise ValueError(f"it has {len(text):,} characters; at most {LARGEST_JSON:,} are read")
        if text.count("[") + text.count("{") > CONTAINERS:
            raise ValueError(f"it has more than {CONTAINERS:,} lists and objects")
        hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
        found = json.loads(text, **hooks)
        if not _is_shallow(found):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{owner} is not JSON as this package writes it: more than {LEVELS} levels are nested") from None
    except ValueError as error:
        raise ValueError(f"{owner} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{owner} must hold a JSON object, got {_kind(found)}")
    return found


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, or of one that a link leads to. Anything else is refused."""
    # Without waiting for whoever has the other end of a FIFO.
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ValueError(f"{path} is {_kind_of_file(mode)}, and no regular file")
    return handle


def open_inside(path: Path, flags: int) -> int:
    """A descriptor of a regular file that has no other name, made if `flags` say so. A link is not followed, but refused."""
    try:
        handle = open_regular(path, flags | os.O_NOFOLLOW)
    except OSError:
        if path.is_symlink():
            raise ValueError(_refused(path, "is a link")) from None
        raise
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise ValueError(_refused(path, "is a hard link, and has another name elsewhere"))
    return handle


def check_run_folder(owner: str, folder: Path) -> None:
    """Refuses a run's folder in which something is neither a regular file nor a folder: links would lead what is written,
    or removed, to somebody else's files. The folder itself may be a link. To be called before anything is written."""
    if folder.is_dir():
        for path in _entries(folder):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise ValueError(f"{owner}: {_refused(path, f'is {_kind_of_file(mode)}')}")


def _entries(folder: Path) -> Iterator[Path]:
    yield from folder.iterdir()
    for name in RUN_TREES:
        for above, folders, files in os.walk(folder / name):
            for entry in (*folders, *files):
                yield Path(above, entry)


def _refused(path: Path, why: str) -> str:
    return f"{path} {why}; a run holds only files and folders of its own, so remove it, or put what it stands for there"


def _kind_of_file(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _is_shallow(found: Any) -> bool:
    level = [found]
    for _ in range(LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
