"""Streaming reader of the plain files in a tar archive. Skips links, sparse files and long names.

The standard library's reader allocates memory as headers demand, and fills the holes of sparse files with zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longstride.data.streams import Reader

BLOCK = 512
PLAIN = (b"0", b"\0")
"""Type flags of a plain file."""


@dataclass(frozen=True)
class Member:
    name: str
    size: int


def tar_members(file: Reader) -> Iterator[Member]:
    """Yields the plain members, in order. The caller may read all bytes of a member from `file`, or none."""
    while True:
        block = file.read(BLOCK)
        while 0 < len(block) < BLOCK and (more := file.read(BLOCK - len(block))):
            block += more
        if not block or not any(block):
            return
        if len(block) < BLOCK:
            raise ValueError(f"{file.name} cannot be read: it was cut short")
        # The checksum counts its own eight bytes as spaces.
        if sum(block) - sum(block[148:156]) + 8 * ord(" ") != _octal(file, block[148:156]):
            raise ValueError(f"{file.name} cannot be read: a header of its members is damaged")
        size = _octal(file, block[124:136])
        before = file.count
        if block[156:157] in PLAIN:
            yield Member(block[:100].partition(b"\0")[0].decode("utf-8", "replace"), size)
        left = size + -size % BLOCK - (file.count - before)
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            left -= len(piece)
        if left:
            raise ValueError(f"{file.name} cannot be read: it was cut short")


def _octal(file: Reader, field: bytes) -> int:
    text = field.strip(b" \0")
    if text.strip(b"01234567"):
        raise ValueError(f"{file.name} cannot be read: a header of its members is damaged")
    return int(text or b"0", 8)
