"""Raw bytes of any files, without decompression."""

from collections.abc import Sequence
from pathlib import Path

from longstride.data.kind import DataKind
from longstride.data.limits import Limit
from longstride.data.plan import Plan
from longstride.data.streams import detect_compression, stream_plan


class RawBytes(DataKind):
    name = "bytes"
    label = "bytes"
    takes_any_preset = True

    @classmethod
    def plan(
        cls, source: Path, limit: Limit | None = None, join: bool = False, others: Sequence[str] = ()
    ) -> Plan:  # fmt: skip
        """Plans a file, or all files of a folder, also those of other kinds."""
        return stream_plan(cls.name, source, False, limit, join)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return detect_compression(path) is None
