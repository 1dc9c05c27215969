"""Any files as their bytes, just as they are, and back."""

from pathlib import Path

from longstride.data.plan import Plan
from longstride.data.streams import stream_plan, to_file

__all__ = ["plan", "to_file"]


def plan(source: Path) -> Plan:
    return stream_plan("bytes", source, unpack=False)
