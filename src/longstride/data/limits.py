"""Limit on the decompressed size of a source, checked during decompression, before memory or disk is used."""

import os
import shlex
from pathlib import Path

from longstride.common.checks import whole_number
from longstride.common.files import walk

LEAST = 1 << 30
RATIO = 100
"""By default a source may decompress to LEAST bytes, or to RATIO times its size on disk if that is more."""
HELD = 1 << 28
"""The most bytes in memory at once, such as the pixels of one image; or a quarter of the user's limit if that is more."""


class Limit:
    """Tracks the bytes read from one source and enforces its limits. ValueError if its files consist of holes."""

    def __init__(self, source: Path, max_bytes: int | None = None) -> None:
        self.source, self.taken, self.held = source, 0, HELD
        members = [path for path in walk(source) if path.is_file()] if source.is_dir() else [source]
        self.most = usual = max(LEAST, RATIO * sum(map(disk_bytes, members)))
        if max_bytes is not None:
            self.most = whole_number("prepare", "max_bytes", max_bytes, 1)
            self.held = max(HELD, self.most // 4)
        # A sparse file of a few bytes on disk could take hours to read. Its bytes may be more than the data in it.
        size = sum(path.stat().st_size for path in members)
        if size > max(usual, self.most):
            self.check(source, "what is in its files", size)

    def take(self, path: Path | str, count: int) -> None:
        """Adds to the bytes read so far; ValueError if the total exceeds the limit."""
        self.taken += count
        if self.taken > self.most:
            before = " and the files before it unpack" if self.source.is_dir() else " unpacks"
            raise ValueError(f"{path}{before} to more than {self.most:,} bytes; {self.hint()}")

    def check(self, path: Path | str, what: str, count: int) -> None:
        """Raises ValueError if `what`, of `count` bytes, alone exceeds the limit."""
        if count > self.most:
            raise ValueError(f"{path}: {what} would take {count:,} bytes; the limit is {self.most:,}; {self.hint(count)}")

    def check_held(self, path: Path | str, what: str, count: int) -> None:
        """As `check`, for bytes that are in memory at once."""
        if count > self.held:
            raise ValueError(
                f"{path}: {what} would take {count:,} bytes of memory; the limit is {self.held:,}; {self.hint(4 * count)}"
            )

    def hint(self, needed: int | None = None) -> str:
        number = "N" if needed is None else str(needed)
        return f"if that is right: longstride data prepare {shlex.quote(str(self.source))} STORE --max-bytes {number}"


def check_holes(path: Path) -> None:
    """Raises ValueError for a large file that consists of holes: to read or hash its zeros could take hours."""
    size = path.stat().st_size
    if size > max(LEAST, RATIO * disk_bytes(path)):
        raise ValueError(f"{path} has {size:,} bytes and only {disk_bytes(path):,} of them on the disk; it is no real data")


def disk_bytes(path: Path) -> int:
    """Returns the bytes that a file occupies on disk, without its holes."""
    stat = path.stat()
    blocks = min(stat.st_size, 512 * getattr(stat, "st_blocks", 0))
    # Some file systems report no blocks, or not at once.
    return blocks if RATIO * blocks >= stat.st_size else max(blocks, _data_bytes(path, stat.st_size))


def _data_bytes(path: Path, size: int) -> int:
    """Returns the bytes of a file outside of its holes."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    data_bytes = end = 0
    with path.open("rb") as file:
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # No more data.
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            data_bytes += end - start
    return data_bytes
