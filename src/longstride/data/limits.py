"""The limit on what a source may unpack to: it is checked as bytes are unpacked, before memory or disk is taken for them."""

import os
import shlex
from pathlib import Path

from longstride.common.checks import whole_number

LEAST = 1 << 30
RATIO = 100
"""Without a number of the user's, a source may unpack to LEAST bytes, or to RATIO times what it takes up on the disk."""
HELD = 1 << 28
"""The most bytes that are held in memory at once, such as the pixels of one image; a quarter of the user's limit if that is
more."""


class Limit:
    """What is left of it, while one source is read."""

    def __init__(self, source: Path, max_bytes: int | None = None) -> None:
        self.source, self.taken, self.held = source, 0, HELD
        if max_bytes is None:
            members = (path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
            self.most = max(LEAST, RATIO * sum(map(disk_bytes, members)))
        else:
            self.most = whole_number("prepare", "max_bytes", max_bytes, 1)
            self.held = max(HELD, self.most // 4)

    def take(self, path: Path | str, count: int) -> None:
        """Counts bytes of the source, and raises ValueError if they are too many."""
        self.taken += count
        if self.taken > self.most:
            before = " and the files before it unpack" if self.source.is_dir() else " unpacks"
            raise ValueError(f"{path}{before} to more than {self.most:,} bytes; {self.fix()}")

    def check(self, path: Path | str, what: str, count: int) -> None:
        """Raises ValueError if `what`, which takes `count` bytes, is too large by itself."""
        if count > self.most:
            raise ValueError(f"{path}: {what} would take {count:,} bytes; the limit is {self.most:,}; {self.fix(count)}")

    def check_held(self, path: Path | str, what: str, count: int) -> None:
        """The same for what is held in memory at once."""
        if count > self.held:
            raise ValueError(
                f"{path}: {what} would take {count:,} bytes of memory; the limit is {self.held:,}; {self.fix(4 * count)}"
            )

    def fix(self, needed: int | None = None) -> str:
        number = "N" if needed is None else str(needed)
        return f"if that is right: longstride data prepare {shlex.quote(str(self.source))} STORE --max-bytes {number}"


def disk_bytes(path: Path) -> int:
    """Bytes of a file without its holes. Of a file with few blocks most may be holes, that read as zeros."""
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
