"""Files that are there whole or not at all: written under a temporary name, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, with the same ending; renamed to it at the end, removed if anything fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        sync(temporary)  # Else a machine that fails may have the name, and nothing in it.
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(owner: str, name: str, path: str | Path) -> Path:
    """`path`, where a file can be written, or an error that says why not: to be asked before the work, not after it."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder; give a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{owner}: {name} = {str(path)!r} cannot be written: {error.strerror}") from None
    return path
