"""Text as its bytes, plain or compressed (.gz, .xz, .bz2, .zip), and back."""

import codecs
from pathlib import Path

from longstride.data.limits import Limit
from longstride.data.plan import ARRAYS, ENCODED, PICTURES, SOUNDS, Plan
from longstride.data.streams import beginning, stream_plan, to_file

__all__ = ["looks_like_text", "plan", "to_file"]

MILLION = 1_000_000
KNOWN = {
    100 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION, "test": 5 * MILLION},
    95 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION},
}
"""enwik8, whole and without its test bytes: the split that everyone reports on."""
LOOK = 1 << 16


def plan(source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """Of a folder, all files but images and sound."""
    return stream_plan("text", source, True, limit, join, KNOWN, other=PICTURES + ARRAYS + SOUNDS + ENCODED)


def looks_like_text(path: Path) -> bool:
    """Whether a file begins as UTF-8 without zeros, once it is unpacked."""
    start = beginning(path, True, LOOK)
    try:
        # The last character may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start
