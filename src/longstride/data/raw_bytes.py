"""Raw bytes of any files, without decompression."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Sequence
from pathlib import Path

from longstride.common.atomic import atomic_path
from longstride.data.kind import EXAMPLE_BYTES, DataKind
from longstride.data.limits import Limit
from longstride.data.plan import Bytes, Plan
from longstride.data.streams import detect_compression, read_start, stream_plan

INSPECTED_BYTES = 1 << 16
ASCII = frozenset([*b"\t\n\r", *range(32, 127)])
"""Bytes of text in most encodings."""
MOST = 0.7
"""Share of these bytes from which a file is taken for text."""
MOST_LETTERS = 0.9
"""The same of letters and white space in UTF-16. Of 4,000 random bytes 85 % are."""
DUMP_WIDTH = 16
"""Bytes in a row of a dump."""


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

    @classmethod
    def remark(cls, path: Path) -> str | None:
        """Names text in another encoding than UTF-8: Latin-1 is mostly ASCII letters and signs, UTF-16 has a mark."""
        start = read_start(path, False, INSPECTED_BYTES)
        is_mostly_ascii = 0 not in start and sum(byte in ASCII for byte in start) >= MOST * len(start)
        if not is_mostly_ascii and not _is_utf16(start):
            return None
        return "no UTF-8, so it is read as bytes; convert it, or longstride data prepare SOURCE STORE --kind text"

    def write_examples(self, sequences: Bytes, folder: Path, stem: str) -> Path:
        """Writes a dump in hexadecimal, as of `hexdump -C`."""
        path = folder / f"{stem}.txt"
        with atomic_path(path) as temporary:
            temporary.write_text(_dump(sequences.tobytes()[:EXAMPLE_BYTES]), encoding="utf-8")
        return path

    def byte_label(self, byte: int) -> str:
        return f"0x{byte:02x}"

    def describe_place(self, tokens: Bytes, place: int, position: int, has_glyph: Callable[[str], bool]) -> str:
        return f"{position - place:>5,} back  {self.byte_label(tokens[place])}"


def _dump(data: bytes) -> str:
    """Returns rows of offset, bytes in hexadecimal, and the same bytes as ASCII."""
    rows = []
    for offset in range(0, len(data), DUMP_WIDTH):
        row = data[offset : offset + DUMP_WIDTH]
        ascii_row = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(f"{offset:08x}  {row.hex(' '):<{3 * DUMP_WIDTH - 1}}  {ascii_row}\n")
    return "".join(rows)


def _is_utf16(start: bytes) -> bool:
    """Whether the start of a file has the mark of UTF-16 and reads as letters and white space."""
    if not start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return False
    text = start[: len(start) // 2 * 2].decode("utf-16", errors="replace")
    letters = sum((letter.isprintable() or letter.isspace()) and letter != "\ufffd" for letter in text)
    return letters >= MOST_LETTERS * len(text)
