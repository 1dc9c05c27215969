"""Raw bytes of any files, without decompression, and back."""

from pathlib import Path

from longstride.data.limits import Limit
from longstride.data.plan import Plan
from longstride.data.streams import stream_plan, to_file

__all__ = ["plan", "to_file"]


def plan(source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """Plans a file, or all files of a folder, as raw bytes."""
    return stream_plan("bytes", source, False, limit, join)
