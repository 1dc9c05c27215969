"""Files as one stream of bytes: opened, unpacked where that is asked for, and read a piece at a time."""

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from longstride.atomic import atomic_path
from longstride.data.plan import Plan, cut, files_under, named_splits
from longstride.data.store import READ, Bytes

MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
OPENERS: dict[str | None, Callable[..., Any]] = {None: open, "gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
# What the readers of the standard library raise for a broken file.
BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Part:
    path: Path
    size: int
    """In bytes, unpacked if the stream is."""


def packing(path: Path) -> str | None:
    """How a file is compressed, by its first bytes: the name may say anything."""
    with path.open("rb") as file:
        start = file.read(6)
    return next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def opened(path: Path, unpack: bool) -> Iterator[IO[bytes]]:
    """The bytes of a file. What goes wrong while they are read becomes an error that names the file."""
    try:
        form = packing(path) if unpack else None
        if form == "zip":
            with zipfile.ZipFile(path) as archive:
                names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
                if len(names) != 1:
                    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                    raise ValueError(f"{path} must hold one file, it holds {len(names)} ({some}); unpack it first")
                with archive.open(names[0]) as file:
                    yield file
        else:
            with OPENERS[form](path, "rb") as file:
                yield file
    except BROKEN as error:
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from None


def beginning(path: Path, unpack: bool, count: int) -> bytes:
    with opened(path, unpack) as file:
        return file.read(count)


def measured(path: Path, unpack: bool) -> Part:
    """The size of a file. One that is compressed is read to its end, so that a broken one is found before the work."""
    if not unpack or packing(path) is None:
        return Part(path, path.stat().st_size)
    size = 0
    with opened(path, unpack) as file:
        while piece := file.read(READ):
            size += len(piece)
    return Part(path, size)


def span(parts: Sequence[Part], unpack: bool, start: int, stop: int) -> Iterator[Bytes]:
    """Bytes start .. stop of the parts, one after the other."""
    for part in parts:
        first, last = max(start, 0), min(stop, part.size)
        if first < last:
            with opened(part.path, unpack) as file:
                file.seek(first)
                while first < last:
                    piece = file.read(min(READ, last - first))
                    if not piece:
                        raise ValueError(f"{part.path} became shorter while it was read")
                    first += len(piece)
                    yield np.frombuffer(piece, np.uint8)
        start, stop = start - part.size, stop - part.size


def stream_plan(kind: str, source: Path, unpack: bool, known: dict[int, dict[str, int]] | None = None) -> Plan:
    """One file, or all files below a folder, cut 90/5/5 per cent, or as `known` says for a total size.

    Files or folders that are named train, valid and test are these splits.
    """
    paths = files_under(source) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source} holds no files")
    parts = {path: measured(path, unpack) for path in paths}
    for part in parts.values():
        if part.size == 0 and not source.is_dir():
            raise ValueError(f"{source} is empty")
    total = sum(part.size for part in parts.values())
    if total == 0:
        raise ValueError(f"{source}: all its files are empty")
    groups = named_splits(source, paths) if source.is_dir() else None
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    if groups:
        for name, members in groups.items():
            chosen = [parts[path] for path in members]
            size = sum(part.size for part in chosen)
            if size == 0:
                raise ValueError(f"{source}: the files of {name} are empty")
            splits[name] = span(chosen, unpack, 0, size)
        return Plan(kind, splits, total, f"{source.name}: splits as its files are named")
    start, sizes = 0, (known or {}).get(total) or cut(source, total, "bytes")
    for name, size in sizes.items():
        splits[name] = span(list(parts.values()), unpack, start, start + size)
        start += size
    shares = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return Plan(kind, splits, total, f"{source.name}: bytes in order, {shares}")


def to_file(data: bytes | Bytes, path: str | Path) -> None:
    """Bytes as a file."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(bytes(data))
