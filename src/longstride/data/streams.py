"""Files as one stream of bytes: optional decompression, and reading piece by piece."""

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from longstride.common.atomic import atomic_path
from longstride.common.checks import short_reason, short_repr
from longstride.data.limits import HELD, Limit
from longstride.data.plan import READ, Bytes, Plan, data_suffix, files_under, named_splits, split_sizes

MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
OPENERS: dict[str | None, Callable[..., Any]] = {None: open, "gzip": gzip.open, "bzip2": bz2.open}
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
"""Supported zip compression methods: those that decompress in bounded memory."""
IN_MEMORY = 1 << 26
"""Up to this many bytes `gather` keeps in memory."""


@dataclass(frozen=True)
class Part:
    """A file of a stream."""

    path: Path
    size: int
    """Bytes, after decompression if the stream is decompressed."""


class Reader:
    """Reads the bytes of one file, decompressed. Every read error becomes a ValueError that names the file."""

    def __init__(self, name: Path | str, file: Any, limit: Limit | None = None) -> None:
        self.name, self.file, self.limit = name, file, limit
        self.count = 0
        """Bytes read so far."""

    def read(self, count: int) -> bytes:
        """Returns up to `count` bytes, b"" at the end. They count against the limit."""
        with name_file_in_errors(self.name):
            piece: bytes = self.file.read(count)
        self.count += len(piece)
        if self.limit:
            self.limit.take(self.name, len(piece))
        return piece

    def read_exactly(self, count: int) -> bytes:
        """Returns `count` bytes; ValueError if the file is shorter. Allocates memory only for bytes that arrive."""
        pieces = []
        while count:
            piece = self.read(min(count, READ))
            if not piece:
                raise ValueError(f"{self.name} ends {count:,} bytes too early; it was cut short")
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def skip(self, count: int) -> None:
        if isinstance(self.file, Xz) or self.limit:
            while count and (piece := self.read(min(count, READ))):
                count -= len(piece)
        else:
            with name_file_in_errors(self.name):
                self.file.seek(count, 1)


class Xz:
    """Reader of xz files. Unlike the standard library's, it bounds the memory for the dictionary."""

    def __init__(self, path: Path, memory: int = HELD) -> None:
        self.file, self.memory = path.open("rb"), memory
        self.decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memory)

    def __enter__(self) -> "Xz":
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def read(self, count: int) -> bytes:
        while True:
            if self.decoder.eof:
                # A file may hold several streams, with zero padding between them.
                rest = self.decoder.unused_data.lstrip(b"\0")
                while not rest and (more := self.file.read(READ)):
                    rest = more.lstrip(b"\0")
                if not rest:
                    return b""
                self.decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, self.memory)
                piece = self._decode(rest, count)
            else:
                given = self.file.read(1 << 16) if self.decoder.needs_input else b""
                if self.decoder.needs_input and not given:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                piece = self._decode(given, count)
            if piece:
                return piece

    def _decode(self, data: bytes, count: int) -> bytes:
        try:
            return self.decoder.decompress(data, count)
        except lzma.LZMAError as error:
            if "Memory usage limit" in str(error):
                raise lzma.LZMAError(f"it needs more than {self.memory:,} bytes of memory; unpack it first") from None
            raise


@contextmanager
def name_file_in_errors(name: Path | str, format: str = "") -> Iterator[None]:
    """Turns any exception into a ValueError that names the file: decoders raise many types for broken files.

    `format`: what the file is read as, for the message.
    """
    try:
        yield
    except Exception as error:
        read_as = f" as {format}" if format else ""
        raise ValueError(f"{name} cannot be read{read_as}: {short_reason(error)}") from None


def detect_compression(path: Path) -> str | None:
    """Returns the compression of a file, from its first bytes rather than its name; None if there is none."""
    with path.open("rb") as file:
        start = file.read(6)
    return next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def open_reader(path: Path, unpack: bool, limit: Limit | None = None) -> Iterator[Reader]:
    """Opens a file for reading. Bytes that are read count against `limit`."""
    with ExitStack() as stack:
        compression = detect_compression(path) if unpack else None
        if compression == "zip":
            entries = [entry for entry in zip_entries(stack, path) if not entry[0].is_dir()]
            if len(entries) != 1:
                names = ", ".join(short_repr(entry.filename) for entry, _ in entries[:3])
                names += ", ..." if len(entries) > 3 else ""
                raise ValueError(f"{path} must hold one file, it holds {len(entries)} ({names}); unpack it first")
            file = open_entry(stack, path, *entries[0])
        else:
            with name_file_in_errors(path):
                file = stack.enter_context(_open(path, compression, limit.held if limit else HELD))
        yield Reader(path, file, limit)


def _open(path: Path, compression: str | None, memory: int) -> Any:
    if compression == "xz":
        return Xz(path, memory)
    return OPENERS[compression](path, "rb")


def zip_entries(stack: ExitStack, path: Path) -> list[tuple[zipfile.ZipInfo, zipfile.ZipFile]]:
    """Returns the entries of a zip file, each with the archive, which the stack closes."""
    with name_file_in_errors(path):
        archive = stack.enter_context(zipfile.ZipFile(path))
        return [(entry, archive) for entry in archive.infolist()]


def open_entry(stack: ExitStack, path: Path, entry: zipfile.ZipInfo, archive: zipfile.ZipFile) -> IO[bytes]:
    if entry.compress_type not in ZIP_METHODS:
        raise ValueError(f"{path} is compressed with zip method {entry.compress_type}; unpack it first")
    with name_file_in_errors(path):
        return stack.enter_context(archive.open(entry))


def read_start(path: Path, unpack: bool, count: int) -> bytes:
    """Returns the first `count` bytes of a file."""
    with open_reader(path, unpack) as file:
        return file.read(count)


def measure(path: Path, unpack: bool, limit: Limit | None = None) -> Part:
    """Returns a file with its size. Reads a compressed file to its end, so that a broken one is found before the work."""
    limit = limit or Limit(path)
    if not unpack or detect_compression(path) is None:
        size = path.stat().st_size
        limit.take(path, size)
        return Part(path, size)
    size = 0
    with open_reader(path, unpack, limit) as file:
        while piece := file.read(READ):
            size += len(piece)
    return Part(path, size)


def gather(pieces: Iterable[Bytes | bytes]) -> Bytes:
    """Joins pieces to one array: in memory if it is small, otherwise in a temporary file."""
    with ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(BytesIO())
        for piece in pieces:
            if file.tell() + len(piece) > IN_MEMORY and isinstance(file, BytesIO):
                small, file = file, stack.enter_context(TemporaryFile())
                file.write(small.getbuffer())
            file.write(piece if isinstance(piece, bytes) else piece.data)
        if isinstance(file, BytesIO):
            return np.frombuffer(file.getvalue(), np.uint8)
        file.flush()
        return np.memmap(file, np.uint8, mode="r")


def read_span(parts: Sequence[Part], unpack: bool, start: int, stop: int) -> Iterator[Bytes]:
    """Yields bytes start .. stop of the concatenated parts, piece by piece."""
    for part in parts:
        first, last = max(start, 0), min(stop, part.size)
        if first < last:
            with open_reader(part.path, unpack) as file:
                file.skip(first)
                while first < last:
                    piece = file.read(min(READ, last - first))
                    if not piece:
                        raise ValueError(f"{part.path} became shorter while it was read")
                    first += len(piece)
                    yield np.frombuffer(piece, np.uint8)
        start, stop = start - part.size, stop - part.size


def stream_plan(
    kind: str,
    source: Path,
    unpack: bool,
    limit: Limit | None = None,
    join: bool = False,
    known: dict[int, dict[str, int]] | None = None,
    others: Sequence[str] = (),
) -> Plan:
    """Plans one file, or all files below a folder, as one stream split 90/5/5 per cent, or as `known` says for this size.

    Files or folders named train, valid and test become these splits, unless `join` is true. `others`: suffixes of files of
    other kinds, which are left out.
    """
    limit = limit or Limit(source)
    paths = files_under(source) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source} holds no files")
    if source.is_dir():
        paths = [path for path in paths if data_suffix(path) not in others]
        if not paths:
            raise ValueError(f"{source} holds no {kind}: all its files are of other kinds")
    groups = named_splits(source, paths) if source.is_dir() and not join else None
    if groups:
        paths = [path for members in groups.values() for path in members]
    parts = {path: measure(path, unpack, limit) for path in paths}
    if parts.get(source, Part(source, 1)).size == 0:
        raise ValueError(f"{source} is empty")
    total = sum(part.size for part in parts.values())
    if total == 0:
        raise ValueError(f"{source}: all its files are empty")
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    if groups:
        for name, members in groups.items():
            chosen = [parts[path] for path in members]
            size = sum(part.size for part in chosen)
            if size == 0:
                raise ValueError(f"{source}: the files of {name} are empty")
            splits[name] = read_span(chosen, unpack, 0, size)
        return Plan(kind, splits, total, f"{source.name}: splits as its files are named", used=paths)
    start, sizes = 0, (known or {}).get(total) or split_sizes(source, total, "bytes")
    for name, size in sizes.items():
        splits[name] = read_span(list(parts.values()), unpack, start, start + size)
        start += size
    shares = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return Plan(kind, splits, total, f"{source.name}: bytes in order, {shares}", used=paths)


def to_file(data: bytes | Bytes, path: str | Path) -> None:
    """Writes bytes to a file, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(bytes(data))
