"""Atomic file writes: a file is written under a temporary name, then renamed."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

TEMPORARY = re.compile(r"\.[a-z0-9-]+\.\d+(-[0-9a-f]{8}\.[a-z0-9]+|\.(json|jsonl|safetensors|png|txt|wav|bin))")
"""Temporary names that `atomic_path` makes for the files of a run. Earlier versions made them without a random part."""


@contextmanager
def add_path_to_errors(path: str | Path) -> Iterator[None]:
    """Adds this path to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` with the same suffix. Renames it to `path` on success, removes it on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _make_empty(path)
    try:
        with add_path_to_errors(path):
            yield temporary
            sync(temporary)  # Otherwise a crash may leave an empty file under the final name.
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _make_empty(path: Path) -> Path:
    """Creates a new file beside `path`, under a random name and with O_EXCL: a link that somebody placed there in advance
    cannot redirect the content to another file."""
    while True:
        temporary = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
        with suppress(FileExistsError):
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            return temporary


def is_temporary(name: str) -> bool:
    """Whether `atomic_path` made this name. Such a file remains when its process was killed while writing."""
    return TEMPORARY.fullmatch(name) is not None


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(owner: str, name: str, path: str | Path, may_replace: bool) -> Path:
    """Checks that a verb may write its output to `path` and returns it; ValueError otherwise. Call it before the long work.

    The folder must exist. An existing file is refused unless `may_replace`: with --force, or for names that a run gives to
    its own files.
    """
    path = Path(path)
    if not path.parent.is_dir():
        what = f"{path.parent} is a file" if path.parent.exists() else f"there is no folder {path.parent}; make it first"
        raise ValueError(f"{owner}: {name} = {str(path)!r} cannot be written: {what}")
    if path.is_file() and not may_replace:
        raise ValueError(f"{owner}: {path} is there already; add --force to replace it, or give another --{name}")
    return check_writable(owner, name, path)


def check_writable(owner: str, name: str, path: str | Path) -> Path:
    """Checks that a file can be written at `path` and returns it; ValueError otherwise. Call it before the long work."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder; give a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{owner}: {name} = {str(path)!r} cannot be written: {error.strerror}") from None
    return path
