"""CIFAR-10 in its two published forms: python batches, without trusting the pickles, and binary batches."""

import io
import math
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from longstride.data.store import Bytes

ITEM = (32, 32, 3)
PLANES = math.prod(ITEM)
RECORD = 1 + PLANES
"""A record of the binary form: the label, then the planes red, green and blue."""
CLASSES = 10
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
FOLDERS = {"cifar-10-batches-py": "", "cifar-10-batches-bin": ".bin"}
IMAGES = 50_000
"""Training images, of which the paper holds back HELD for validation."""
HELD = 2_000

Groups = dict[str, Bytes]


def find(folder: Path) -> Path | None:
    """The folder of batches: this one or one of the published name in it."""
    for place in (folder, *(folder / name for name in FOLDERS)):
        if any((place / (BATCHES[0] + ending)).is_file() for ending in FOLDERS.values()):
            return place
    return None


def from_folder(folder: Path) -> Groups:
    """The images of train and, if it is there, test: [n, 32, 32, 3] each."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return _groups(folder, names, lambda name: (folder / name).read_bytes())


def from_tar(path: Path) -> Groups:
    """The same from the archive, without unpacking it to the disk."""
    wanted = {name + ending for name in (*BATCHES, TEST) for ending in FOLDERS.values()}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.isfile() and name in wanted:
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no CIFAR-10; looked for {BATCHES[0]} and {BATCHES[0]}.bin; unpack it")
    return _groups(path, set(found), found.__getitem__)


def _groups(owner: Path, names: set[str], read: Callable[[str], bytes]) -> Groups:
    ending = "" if BATCHES[0] in names else ".bin"
    for name in BATCHES:
        if name + ending not in names:
            raise ValueError(f"{owner}: {name + ending} is missing; CIFAR-10 has five training batches")
    parse = read_binary if ending else read_python

    def images(name: str) -> Bytes:
        return parse(read(name + ending), f"{owner}/{name}{ending}")

    groups = {"train": np.concatenate([images(name) for name in BATCHES])}
    if TEST + ending in names:
        groups["test"] = images(TEST)
    return groups


def is_binary(path: Path) -> bool:
    """Whether a file is made of such records, as far as its size and its labels tell."""
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        return False
    return int(np.memmap(path, np.uint8, mode="r")[::RECORD].max()) < CLASSES


def read_binary(data: bytes, owner: str) -> Bytes:
    if not data or len(data) % RECORD:
        raise ValueError(f"{owner} has {len(data)} bytes, no multiple of CIFAR-10's {RECORD}; it was cut short")
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() >= CLASSES:
        raise ValueError(f"{owner} has label {records[:, 0].max()}; CIFAR-10 has labels from 0 to {CLASSES - 1}")
    return interleaved(records[:, 1:])


def read_python(data: bytes, owner: str) -> Bytes:
    try:
        batch = Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # A broken pickle may raise anything.
        raise ValueError(f"{owner} is refused: {error}") from None
    found = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    images = found.array if isinstance(found, Array) else None
    if images is None or images.ndim != 2 or images.shape[1] != PLANES or not len(images):
        raise ValueError(f"{owner} is no batch of CIFAR-10: it must hold 'data', uint8 of shape [n, {PLANES}]")
    return interleaved(images)


def interleaved(planes: Bytes) -> Bytes:
    """Rows of planes red, green, blue as images whose channel is fastest: [n, 32, 32, 3]."""
    height, width, channels = ITEM
    return np.ascontiguousarray(planes.reshape(-1, channels, height, width).transpose(0, 2, 3, 1))


class Array:
    """Stands in for a NumPy array in a pickle: takes its shape and bytes, and runs nothing of NumPy's on them."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: Bytes | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, Type) or not isinstance(raw, bytes) or fortran:
            raise pickle.UnpicklingError("it holds an array that is not uint8 in rows")
        self.array = np.frombuffer(raw, np.uint8).reshape(tuple(int(size) for size in shape))


class Type:
    """Stands in for NumPy's type uint8."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Its byte order and alignment say nothing about single bytes."""


class Maker:
    """What a pickle may call. An object without fields, so that a pickle cannot change it."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what it may only call")


class MakeArray(Maker):
    __slots__ = ()

    def __call__(self, *_: Any) -> Array:
        return Array()


class MakeType(Maker):
    __slots__ = ()

    def __call__(self, name: Any, *_: Any) -> Type:
        if name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of {name!r}, not of uint8")
        return Type()


class MakeBytes(Maker):
    """How Python 3 writes bytes in a pickle for Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it holds bytes in an unknown form")
        return text.encode("latin1")


MAKERS: dict[tuple[str, str], Maker] = {
    ("numpy.core.multiarray", "_reconstruct"): MakeArray(),
    ("numpy._core.multiarray", "_reconstruct"): MakeArray(),
    ("numpy", "ndarray"): Maker(),
    ("numpy", "dtype"): MakeType(),
    ("_codecs", "encode"): MakeBytes(),
}


class Unpickler(pickle.Unpickler):
    """Admits dictionaries, lists, text, bytes, numbers and arrays of uint8, and nothing else: no name in a pickle is ever
    imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in MAKERS:
            raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}, which no batch of CIFAR-10 has")
        return MAKERS[module, name]
