"""SHA-256 of files, cached in the user's cache folder, so that large data is not read at every start."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from longstride.common.atomic import add_path_to_errors, atomic_path
from longstride.common.console import Progress
from longstride.common.files import real_path

CACHE = "LONGSTRIDE_CACHE"
"""Environment variable that replaces ~/.cache/longstride."""
HASH_FOLDER = ".sha256"
"""Folder in the data cache, with one small file per cached hash."""
LARGE = 1 << 28
"""Bytes from which a progress bar is shown."""
SETTLED = 2_000_000_000
"""Nanoseconds. ctime has a coarse clock, and a second change within one tick would not show. So a hash is cached only if the
last change is older than this."""
CHUNK = 1 << 20


def data_cache() -> Path:
    """Returns the folder of prepared data: ~/.cache/longstride/data, or $LONGSTRIDE_CACHE/data."""
    return Path(os.environ.get(CACHE) or "~/.cache/longstride").expanduser() / "data"


def cached_sha256(paths: Sequence[Path], cache: Path | None = None, progress: bool = True) -> str:
    """Returns the SHA-256 of the concatenated files.

    The result is cached in `cache`, keyed by each file's path, size, inode, mtime and ctime. A program cannot set ctime
    back, so content that changes at equal size and mtime is read again.
    """
    return _cached(paths, cache, lambda: _hash(paths, progress))


def _cached(paths: Sequence[Path], cache: Path | None, compute: Callable[[], str]) -> str:
    before, newest = _identity(paths)
    cache_file = (data_cache() if cache is None else cache) / HASH_FOLDER / before
    with suppress(OSError, ValueError):
        known = cache_file.read_text(encoding="ascii").strip()
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    started = time.time_ns()
    digest = compute()
    if newest + SETTLED < started and _identity(paths)[0] == before:
        # A cache that cannot be written only costs time at the next start.
        with suppress(OSError), atomic_path(cache_file) as temporary:
            temporary.write_text(digest, encoding="ascii")
    return digest


def _identity(paths: Sequence[Path]) -> tuple[str, int]:
    """Returns a key that changes whenever a file does, and the latest ctime in nanoseconds."""
    lines, newest = hashlib.sha256(), 0
    for path in paths:
        stat = path.stat()
        fields = (real_path(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        lines.update("\0".join(map(str, fields)).encode("utf-8", "surrogateescape") + b"\0")
        newest = max(newest, stat.st_ctime_ns)
    return lines.hexdigest(), newest


def _hash(paths: Sequence[Path], progress: bool) -> str:
    digest, total = hashlib.sha256(), sum(path.stat().st_size for path in paths)
    name = f"checking {paths[0].name if len(paths) == 1 else paths[0].parent}"
    with Progress(total, name=name, shown=progress and total >= LARGE, plain_lines=False) as bar:
        for path in paths:
            with add_path_to_errors(path), path.open("rb", buffering=0) as file:
                while piece := file.read(CHUNK):
                    digest.update(piece)
                    bar.advance(len(piece))
    return digest.hexdigest()
