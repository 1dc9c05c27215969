"""Reader of .npy and .npz files of uint8. Matches headers with regular expressions instead of evaluating them."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longstride.common.checks import short_repr
from longstride.data.limits import Limit
from longstride.data.plan import READ, Bytes, is_compressed
from longstride.data.streams import Reader, gather, open_entry, open_reader, zip_entries

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 14
"""The most bytes of a header. NumPy writes 118 for a shape of four sizes."""
DIMENSIONS = 32
"""The most dimensions: more than images have, fewer than NumPy supports."""
FIELDS = {
    "descr": r"'([<>|=]?[A-Za-z][0-9]{0,9})'",
    "fortran_order": "(True|False)",
    "shape": r"\(((?: *[0-9]{1,18}L? *,)* *(?:[0-9]{1,18}L?)? *)\)",
}
ENTRY = re.compile("|".join(rf" *'{name}' *: *{value} *(?:, *|(?=}}))" for name, value in FIELDS.items()))


@dataclass(frozen=True)
class Header:
    dtype: str
    fortran: bool
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def open_npy(path: Path, limit: Limit | None = None) -> Bytes:
    """Opens the array of a file as a memory map. A compressed file (.npy.xz) is decompressed first."""
    limit = limit or Limit(path)
    if is_compressed(path):
        with open_reader(path, True, limit) as file:
            return _read_array(file, limit)
    limit.take(path, path.stat().st_size)
    with open_reader(path, False) as file:
        header = read_header(file)
        start = file.file.tell()
    rest = path.stat().st_size - start
    if rest < header.size:
        raise ValueError(f"{path} cannot be read as .npy: its header says {list(header.shape)}, and {rest:,} bytes follow")
    flat = np.memmap(path, np.uint8, mode="r", offset=start, shape=(header.size,))
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def open_npz(path: Path, limit: Limit | None = None) -> Iterator[tuple[str, Bytes]]:
    """Yields the names and arrays of a zip file of .npy files."""
    limit = limit or Limit(path)
    with ExitStack() as stack:
        for entry, archive in zip_entries(stack, path):
            name = entry.filename
            if not name.endswith(".npy"):
                raise ValueError(f"{path} cannot be read as .npz: it holds {short_repr(name)}, which is no .npy file")
            with ExitStack() as opening:
                file = open_entry(opening, path, entry, archive)
                yield name.removesuffix(".npy"), _read_array(Reader(f"{path}: array {short_repr(name)}", file, limit), limit)


def _read_array(file: Reader, limit: Limit) -> Bytes:
    header = read_header(file)
    limit.check(file.name, f"an array of {list(header.shape)}", header.size)

    def pieces() -> Iterator[bytes]:
        left = header.size
        while left:
            piece = file.read_exactly(min(left, READ))
            left -= len(piece)
            yield piece

    flat = gather(pieces())
    if file.read(1):
        raise ValueError(f"{file.name} is longer than its header says, {header.size:,} bytes")
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def read_header(file: Reader) -> Header:
    """Reads the header of a .npy file: magic, version, and a dictionary as text."""
    start = file.read(8)
    if not start.startswith(MAGIC) or len(start) < 8 or start[6] not in (1, 2, 3):
        raise ValueError(f"{file.name} cannot be read as .npy: it does not begin as one")
    length = int.from_bytes(file.read_exactly(2 if start[6] == 1 else 4), "little")
    if length > MAX_HEADER:
        raise ValueError(f"{file.name} cannot be read as .npy: its header would have {length:,} bytes")
    text = file.read_exactly(length).decode("latin1").strip(" \n")
    fields = parse(text)
    if fields is None:
        raise ValueError(f"{file.name} cannot be read as .npy: its header is no descr, fortran_order and shape")
    dtype = _dtype(fields["descr"])
    if dtype != "uint8":
        raise ValueError(f"{file.name} holds {dtype}; images must be uint8, from 0 to 255")
    shape = tuple(int(size.strip(" L")) for size in fields["shape"].split(",") if size.strip())
    if len(shape) > DIMENSIONS:
        raise ValueError(f"{file.name} has {len(shape)} dimensions; at most {DIMENSIONS} are read")
    return Header(dtype, fields["fortran_order"] == "True", shape)


def parse(text: str) -> dict[str, str] | None:
    """Returns the three fields of a header as text, in any order; None if it is anything else."""
    if not text.startswith("{") or not text.endswith("}"):
        return None
    fields: dict[str, str] = {}
    place = 1
    while place < len(text) - 1:
        match = ENTRY.match(text, place)
        if match is None:
            return None
        name = match[0].split("'")[1]
        if name in fields:
            return None
        fields[name] = next(group for group in match.groups() if group is not None)
        place = match.end()
    return fields if fields.keys() == FIELDS.keys() else None


def _dtype(code: str) -> str:
    try:
        return np.dtype(code).name
    except (TypeError, ValueError):
        return repr(code)
