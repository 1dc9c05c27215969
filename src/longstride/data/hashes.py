"""SHA-256 of files, remembered in the user's cache folder, so that large data is read once and not at every start."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from longstride.common.atomic import atomic_path
from longstride.common.console import byte_bar
from longstride.common.files import real_path

CACHE = "LONGSTRIDE_CACHE"
"""The variable that names another folder than ~/.cache/longstride."""
MEMORY = ".sha256"
"""The folder, in the cache of prepared data, with one small file for each remembered hash."""
LARGE = 1 << 28
"""Bytes from which a progress bar is shown."""
SETTLED = 2_000_000_000
"""Nanoseconds. A file's time of change has a coarse clock: a hash is remembered only if the change is older than this, or a
second change within the same tick would not show."""
CHUNK = 1 << 20


def data_cache() -> Path:
    """The folder of prepared data: ~/.cache/longstride/data, or the folder data in what LONGSTRIDE_CACHE names."""
    return Path(os.environ.get(CACHE) or "~/.cache/longstride").expanduser() / "data"


def sha256_of(paths: Sequence[Path], cache: Path | None = None, progress: bool = True) -> str:
    """The SHA-256 of the bytes of these files, one after the other; for one file, its SHA-256.

    The result is remembered in `cache` by each file's path, size, inode and times of modification and of change (mtime and
    ctime). The last of these cannot be set back, so content that changes at equal size and mtime is read again.
    """
    return _remembered(paths, cache, lambda: _hash(paths, progress))


def _remembered(paths: Sequence[Path], cache: Path | None, compute: Callable[[], str]) -> str:
    before, newest = _identity(paths)
    memory = (data_cache() if cache is None else cache) / MEMORY / before
    with suppress(OSError, ValueError):
        known = memory.read_text(encoding="ascii").strip()
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    started = time.time_ns()
    digest = compute()
    if newest + SETTLED < started and _identity(paths)[0] == before:
        # A cache that cannot be written costs time at the next start, and nothing else.
        with suppress(OSError), atomic_path(memory) as temporary:
            temporary.write_text(digest, encoding="ascii")
    return digest


def _identity(paths: Sequence[Path]) -> tuple[str, int]:
    """What changes whenever one of the files does, and the latest time at which one did, in nanoseconds."""
    lines, newest = hashlib.sha256(), 0
    for path in paths:
        stat = path.stat()
        fields = (real_path(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        lines.update("\0".join(map(str, fields)).encode("utf-8", "surrogateescape") + b"\0")
        newest = max(newest, stat.st_ctime_ns)
    return lines.hexdigest(), newest


def _hash(paths: Sequence[Path], progress: bool) -> str:
    digest, total = hashlib.sha256(), sum(path.stat().st_size for path in paths)
    with byte_bar(progress and total >= LARGE) as bar:
        task = bar.add_task(f"checking {paths[0].name if len(paths) == 1 else paths[0].parent}", total=total)
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(CHUNK):
                    digest.update(piece)
                    bar.advance(task, len(piece))
    return digest.hexdigest()
