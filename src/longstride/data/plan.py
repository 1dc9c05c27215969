"""What is to be written, before a byte of it is: the kind of data, and where each split comes from."""

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.data.store import Bytes

WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
PACKED = (".gz", ".xz", ".bz2")


@dataclass(frozen=True)
class Plan:
    kind: str
    splits: dict[str, Iterable[Bytes] | Bytes]
    """The pieces of each split; they are read as they are written."""
    total: int
    """Bytes of all splits, or about as many: for the progress bar."""
    source: str
    item: tuple[int, ...] = ()
    rate: int | None = None


def cut(owner: object, count: int, things: str) -> dict[str, int]:
    """90, 5 and 5 per cent of `count`, and at least one for each split."""
    if count < 3:
        raise ValueError(f"{owner} holds {count} {things}; at least 3 are needed, for train, valid and test")
    part = max(1, count * 5 // 100)
    return {"train": count - 2 * part, "valid": part, "test": part}


def split_of(name: str) -> str | None:
    """The split that a name speaks of, such as valid for 'piano-valid.u8'."""
    found = {WORDS[word] for word in re.split("[^a-z]+", name.lower()) if word in WORDS}
    return found.pop() if len(found) == 1 else None


def named_splits(folder: Path, paths: Sequence[Path], valid_from_train: bool = False) -> dict[str, list[Path]] | None:
    """The splits that files or folders right under `folder` have by name; None unless all have such names, and not only one.

    `valid_from_train`: whether the caller can do without valid.
    """
    groups: dict[str, list[Path]] = {}
    for path in paths:
        name = split_of(path.relative_to(folder).parts[0])
        if name is None:
            return None
        groups.setdefault(name, []).append(path)
    if len(groups) < 2:
        return None
    # To mix test with the rest without a word would be worse than to refuse it.
    missing = {"train"} | (set() if valid_from_train else {"valid"})
    for name in sorted(missing - set(groups)):
        raise ValueError(f"{folder} has files named for {' and '.join(groups)}, and none for {name}; add or rename some")
    return groups


def is_packed(path: Path) -> bool:
    """Whether a name says that the file is compressed."""
    return path.suffix.lower() in PACKED


def ending(path: Path) -> str:
    """The ending of a name in small letters, without that of the compression: .u8 of 'piano.u8.xz'."""
    return (Path(path.stem) if is_packed(path) else path).suffix.lower()


def files_under(folder: Path, endings: Sequence[str] = ()) -> list[Path]:
    """Every file below a folder, sorted, hidden ones left out."""
    found = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and (not endings or ending(path) in endings):
            found.append(path)
    return sorted(found)


def optional(module: str, purpose: str) -> Any:
    """A module that the core does without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{purpose} needs {module.split('.')[0]}: pip install 'longstride[data]' ({error})") from None
