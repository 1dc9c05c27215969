"""Limit on the decompressed size of a source, checked during decompression, before memory or disk is used."""

import os
import shlex
from pathlib import Path

from longstride.common.checks import whole_number

LEAST = 1 << 30
RATIO = 100
"""By default a source may decompress to LEAST bytes, or to RATIO times its size on disk if that is more."""
HELD = 1 << 28
"""The most bytes in memory at once, such as the pixels of one image; or a quarter of the user's limit if that is more."""


class Limit:
    """Tracks the bytes read from one source and enforces its limits."""

    def __init__(self, source: Path, max_bytes: int | None = None) -> None:
        self.source, self.taken, self.held = source, 0, HELD
        if max_bytes is None:
            members = (path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
            self.most = max(LEAST, RATIO * sum(map(disk_bytes, members)))
        else:
            self.most = whole_number("prepare", "max_bytes", max_bytes, 1)
            self.held = max(HELD, self.most // 4)

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


def disk_bytes(path: Path) -> int:
    """Returns the bytes that a file occupies on disk, without its holes."""
    stat = path.stat()
    blocks = 512 * getattr(stat, "st_blocks", 0)
    if blocks or not stat.st_size or not hasattr(os, "SEEK_DATA"):
        return min(stat.st_size, blocks) if blocks else stat.st_size
    # Some file systems report no blocks at all.
    with path.open("rb") as file:
        try:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError:
            return 0
    return stat.st_size
