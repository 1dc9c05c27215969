"""Text as its bytes, plain or compressed (.gz, .xz, .bz2, .zip), and back."""

import codecs
from pathlib import Path

from longstride.data.limits import Limit
from longstride.data.plan import ARRAYS, ENCODED, PICTURES, SOUNDS, Plan
from longstride.data.streams import read_start, stream_plan, to_file

__all__ = ["looks_like_text", "plan", "to_file"]

MILLION = 1_000_000
KNOWN_SPLITS = {
    100 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION, "test": 5 * MILLION},
    95 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION},
}
"""The standard splits of enwik8, complete and without its test bytes."""
INSPECTED_BYTES = 1 << 16


def plan(source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """Plans a text file, or all files of a folder except images and sound."""
    return stream_plan("text", source, True, limit, join, KNOWN_SPLITS, other=PICTURES + ARRAYS + SOUNDS + ENCODED)


def looks_like_text(path: Path) -> bool:
    """Whether the start of a file, decompressed, is UTF-8 without zero bytes."""
    start = read_start(path, True, INSPECTED_BYTES)
    try:
        # The last character may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start
