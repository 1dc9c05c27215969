"""CIFAR-10 in its two published forms: python batches, without trusting the pickles, and binary batches."""

import math
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np

from longstride.data.limits import Limit
from longstride.data.pickles import Array, read_pickle
from longstride.data.plan import Bytes
from longstride.data.streams import open_reader
from longstride.data.tars import tar_members

ITEM = (32, 32, 3)
PLANES = math.prod(ITEM)
RECORD = 1 + PLANES
"""A record of the binary form: the label, then the planes red, green and blue."""
CLASSES = 10
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
FOLDERS = {"cifar-10-batches-py": "", "cifar-10-batches-bin": ".bin"}
WANTED = {name + ending for name in (*BATCHES, TEST) for ending in FOLDERS.values()}
OTHER_FILES = {"batches.meta", "batches.meta.txt", "readme.html"}
"""Other files in the published folders; they hold no images."""
IMAGES = 50_000
"""Training images, of which the paper holds back HELD_OUT for validation."""
HELD_OUT = 2_000

Groups = dict[str, Bytes]


def find_batches(folder: Path) -> Path | None:
    """Returns the folder with the batches: this one, or one of the published name in it; None if there is none."""
    for place in (folder, *(folder / name for name in FOLDERS)):
        if any((place / (BATCHES[0] + ending)).is_file() for ending in FOLDERS.values()):
            return place
    return None


def from_folder(folder: Path, limit: Limit | None = None) -> Groups:
    """Returns the images of train and, if present, test: [n, 32, 32, 3] each."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    files = [folder / name for name in names & WANTED]
    (limit or Limit(folder)).check_held(folder, "its batches", sum(path.stat().st_size for path in files))
    return _groups(folder, names, lambda name: (folder / name).read_bytes())


def from_tar(path: Path, limit: Limit | None = None) -> Groups:
    """As `from_folder`, from the archive, without unpacking it to disk."""
    limit = limit or Limit(path)
    batches: dict[str, bytes] = {}
    with open_reader(path, True, limit) as file:
        held = 0
        for member in tar_members(file):
            name = PurePosixPath(member.name).name
            if name in WANTED:
                if name in batches:
                    raise ValueError(f"{path} holds {name} twice; unpack it and give the folder that is meant")
                held += member.size
                limit.check_held(path, f"what it holds, up to {name},", held)
                batches[name] = file.read_exactly(member.size)
    if not batches:
        raise ValueError(f"{path} holds no CIFAR-10; looked for {BATCHES[0]} and {BATCHES[0]}.bin; unpack it")
    return _groups(path, set(batches), batches.__getitem__)


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
    """Whether a file consists of records of the binary form, judged by its size and labels."""
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        return False
    return int(np.memmap(path, np.uint8, mode="r")[::RECORD].max()) < CLASSES


def read_binary(data: bytes | Bytes, owner: str) -> Bytes:
    """Returns the images of a batch in the binary form."""
    return interleave_channels(records(data, owner)[:, 1:])


def records(data: bytes | Bytes, owner: str) -> Bytes:
    """Returns the validated records of the binary form, [n, 1 + 3072]."""
    if not len(data) or len(data) % RECORD:
        raise ValueError(f"{owner} has {len(data)} bytes, no multiple of CIFAR-10's {RECORD}; it was cut short")
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD) if isinstance(data, bytes) else data.reshape(-1, RECORD)
    if rows[:, 0].max() >= CLASSES:
        raise ValueError(f"{owner} has label {rows[:, 0].max()}; CIFAR-10 has labels from 0 to {CLASSES - 1}")
    return rows


def read_python(data: bytes, owner: str) -> Bytes:
    """Returns the images of a pickled batch."""
    try:
        batch = read_pickle(data)
    except Exception as error:  # A broken pickle may raise anything.
        raise ValueError(f"{owner} is refused: {error}") from None
    data_entry = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    images = data_entry.array if isinstance(data_entry, Array) else None
    if images is None or images.shape[1] != PLANES:
        raise ValueError(f"{owner} is no batch of CIFAR-10: it must hold 'data', uint8 of shape [n, {PLANES}]")
    return interleave_channels(images)


def interleave_channels(planes: Bytes) -> Bytes:
    """Converts rows of red, green and blue planes to images with the channel last: [n, 32, 32, 3]."""
    height, width, channels = ITEM
    return np.ascontiguousarray(planes.reshape(-1, channels, height, width).transpose(0, 2, 3, 1))
