"""Stores: prepared data as a folder with manifest.json and one file per split, train.bin, valid.bin, test.bin."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from longstride.common.atomic import add_path_to_errors
from longstride.common.checks import short_repr, whole_number
from longstride.common.files import file_sha256, read_json
from longstride.data.hashes import cached_sha256
from longstride.data.kind import DataKind
from longstride.data.kinds import KINDS, kind_class
from longstride.data.limits import check_holes
from longstride.data.plan import SPLITS, Bytes

VERSION = 1
MANIFEST = "manifest.json"
FIELDS = ("version", "kind", "item", "rate", "splits", "source")


@dataclass(frozen=True)
class Store:
    """Prepared data in a folder, as its manifest describes it."""

    folder: Path
    kind: str
    item: tuple[int, ...]
    """Height, width and channels of an image; empty for a stream of bytes."""
    rate: int | None
    """Sample rate of audio; None otherwise."""
    splits: dict[str, int]
    """Bytes of each split."""
    sha256: dict[str, str]
    source: str = ""
    """Description of the source and of how it was split."""
    given: Path | None = field(default=None, compare=False)
    """The source that the user gave, if the folder is one of the cache."""

    @property
    def shown(self) -> Path:
        """The path that messages name: a user does not know the folders of the cache."""
        return self.folder if self.given is None else self.given

    def path(self, name: str) -> Path:
        if name not in self.splits:
            raise ValueError(f"{self.shown}: there is no split {name!r}; it has {', '.join(self.splits)}")
        return self.folder / f"{name}.bin"

    def split(self, name: str) -> "np.memmap[Any, np.dtype[np.uint8]]":
        """Returns the bytes of a split as a memory map."""
        return np.memmap(self.path(name), dtype=np.uint8, mode="r")

    @property
    def data_kind(self) -> DataKind:
        """The kind of data, with the item and the rate of this store."""
        return kind_class(self.kind)(self.item, self.rate)

    @property
    def item_bytes(self) -> int | None:
        return math.prod(self.item) if self.item else None

    def to_json(self) -> str:
        splits = {name: {"bytes": size, "sha256": self.sha256[name]} for name, size in self.splits.items()}
        fields = asdict(self) | {"version": VERSION, "splits": splits}
        return json.dumps({name: fields[name] for name in FIELDS}, indent=2) + "\n"


def open_store(folder: str | Path) -> Store:
    """Opens the store in a folder. Checks the manifest and the file sizes; `verify` also reads the bytes."""
    folder = Path(folder)
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{folder} is no prepared data: it has no {MANIFEST}")
    store = read_manifest(folder, manifest)
    for name, size in store.splits.items():
        path = store.path(name)
        if not path.is_file():
            raise ValueError(f"{path} is missing; {MANIFEST} names it, with {size} bytes. Prepare the data again")
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; {MANIFEST} says {size}. Prepare the data again")
        check_holes(path)
    return store


def verify(store: Store, splits: Iterable[str] | None = None) -> None:
    """Compares the SHA-256 of the given splits, or all, with the manifest; ValueError if one differs."""
    for name in store.splits if splits is None else splits:
        _compare(store, name, file_sha256(store.path(name)))


def verify_once(
    store: Store, splits: Iterable[str] | None = None, cache: str | Path | None = None, progress: bool = True
) -> None:
    """As `verify`, but reads only files that have changed since the last time: hashes are remembered in the cache."""
    for name in store.splits if splits is None else splits:
        _compare(store, name, cached_sha256([store.path(name)], None if cache is None else Path(cache), progress))


def _compare(store: Store, name: str, digest: str) -> None:
    if digest != store.sha256[name]:
        raise ValueError(
            f"{store.path(name)} has SHA-256 {digest}; {MANIFEST} says {store.sha256[name]}. Prepare the data again"
        )


def write_store(
    folder: str | Path,
    kind: str,
    splits: Mapping[str, Iterable[Bytes] | Bytes],
    item: tuple[int, ...] = (),
    rate: int | None = None,
    source: str = "",
) -> Store:
    """Writes the splits piece by piece into a temporary folder, which is renamed to `folder` at the end.

    A folder that already holds the same bytes is left as it is. Any other folder that is not empty is refused.
    """
    folder = Path(folder).absolute()
    item = tuple(item)
    _check(str(folder), kind, item, rate, list(splits))
    check_target(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex[:12]}")
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error.strerror}") from None
        sizes, digests = {}, {}
        with add_path_to_errors(folder):
            for name in sorted(splits, key=SPLITS.index):
                sizes[name], digests[name] = _write(temporary / f"{name}.bin", splits[name])
            store = Store(folder, kind, item, rate, sizes, digests, source)
            _check_sizes(str(folder), store)
            (temporary / MANIFEST).write_text(store.to_json())
        try:
            os.rename(temporary, folder)
        except OSError:
            # The folder exists: with the same data, from earlier or from another process, or with anything else.
            existing = open_store(folder)
            if (existing.kind, existing.item, existing.rate, existing.sha256) != (kind, item, rate, digests):
                raise ValueError(f"{folder} already holds other data; remove it or give another folder") from None
            return existing
        return store
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(folder: str | Path) -> None:
    """Raises ValueError for a folder that `write_store` would refuse for any data. Call it before the work."""
    folder = Path(folder)
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise ValueError(f"{folder} is not empty and holds no prepared data; give another folder")
        if (folder / MANIFEST).is_file():
            open_store(folder)
    elif folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} is a file; give the folder that is to be made")
    parent_folder = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent_folder.is_dir() or not os.access(parent_folder, os.W_OK):
        raise ValueError(
            f"{folder} cannot be written: {parent_folder} is {'not writable' if parent_folder.is_dir() else 'a file'}"
        )


def _write(path: Path, pieces: Iterable[Bytes] | Bytes) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        for piece in [pieces] if isinstance(pieces, np.ndarray) else pieces:
            if piece.dtype != np.uint8:
                raise ValueError(f"{path.name}: a store holds uint8, got {piece.dtype}")
            flat = np.ascontiguousarray(piece).reshape(-1)
            file.write(flat.data)
            digest.update(flat.data)
            size += flat.size
        # The bytes must be on the disk before the rename is.
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _check(owner: str, kind: object, item: tuple[Any, ...], rate: object, splits: list[str]) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{owner}: kind must be one of {', '.join(KINDS)}, got {short_repr(kind)}")
    kind_class(kind).check_form(owner, item, rate)
    for name in splits:
        if name not in SPLITS:
            raise ValueError(f"{owner}: splits must be among {', '.join(SPLITS)}, got {short_repr(name)}")
    for name in ("train", "valid"):
        if name not in splits:
            raise ValueError(f"{owner}: split {name!r} is required, got {', '.join(splits) or 'none'}")


def _check_sizes(owner: str, store: Store) -> None:
    for name, size in store.splits.items():
        if size == 0:
            raise ValueError(f"{owner}: split {name!r} is empty")
        if store.item_bytes and size % store.item_bytes:
            raise ValueError(f"{owner}: split {name!r} has {size} bytes, no multiple of an item's {store.item_bytes}")


def read_manifest(folder: Path, manifest: Path) -> Store:
    """Reads a manifest and returns the store that it describes. `folder` need not exist."""
    given = read_json(manifest)
    if "version" not in given:
        raise ValueError(f"{manifest} is no manifest of prepared data: it has no version")
    if given["version"] != VERSION:
        raise ValueError(f"{manifest} has version {short_repr(given['version'])}; this release reads version {VERSION}")
    for name in FIELDS:
        if name not in given:
            raise ValueError(f"{manifest}: {name} is missing")
    for name, kind in (("item", list), ("splits", dict), ("source", str)):
        if not isinstance(given[name], kind):
            raise ValueError(f"{manifest}: {name} must be a {kind.__name__}, got {short_repr(given[name])}")
    _check(str(manifest), given["kind"], tuple(given["item"]), given["rate"], list(given["splits"]))
    sizes, digests = {}, {}
    for name, entry in given["splits"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            raise ValueError(f"{manifest}: split {name!r} must have bytes and sha256, got {short_repr(entry)}")
        sizes[name] = whole_number(str(manifest), f"bytes of {name}", entry.get("bytes"), 0)
        digests[name] = entry["sha256"]
    store = Store(folder, given["kind"], tuple(given["item"]), given["rate"], sizes, digests, given["source"])
    _check_sizes(str(manifest), store)
    return store
