"""What is to be written, before a byte of it is: the kind of data, and where each split comes from."""

import importlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.data.store import SPLITS, Bytes

WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
PACKED = (".gz", ".xz", ".bz2")
PICTURES = (".png", ".jpg", ".jpeg")
ARRAYS = (".npy", ".npz")
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
ENCODED = (".u8", ".ulaw")
"""Files that hold sound as mu-law codes already, also compressed (piano.u8.xz)."""


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
    used: Sequence[Path] = ()
    """Of a folder: the files that are read. All others are left out."""


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


def exact_split(name: str) -> str | None:
    """The split of a name that has no other word before its endings, such as train for 'train-02.txt.gz'."""
    words = re.findall("[a-z]+", name.lower().partition(".")[0])
    return split_of(name) if len(words) == 1 and words[0] in WORDS else None


def named_splits(folder: Path, paths: Sequence[Path], valid_from_train: bool = False) -> dict[str, list[Path]] | None:
    """The splits that files or folders are named for, or None if they are not named so.

    Names right under `folder` count. If each split that occurs there has an exact name, such as train.txt or valid/, only
    exact names do, and 'training-notes.txt' is none. If no name there speaks of valid or test, exact names further down
    count, provided that train and another split are among them.

    Files without a split are in no group: they are left out. If they have more bytes than the others, ValueError is raised,
    as it is if train or valid is missing: data that is named test must not become training data by accident.
    `valid_from_train`: whether the caller can do without valid.
    """
    groups = _groups(paths, [split_of(path.relative_to(folder).parts[0]) for path in paths])
    exact = _groups(paths, [exact_split(path.relative_to(folder).parts[0]) for path in paths])
    if set(exact) == set(groups):
        groups = exact
    if set(groups) <= {"train"}:
        groups = _groups(
            paths, [next(filter(None, map(exact_split, path.relative_to(folder).parts)), None) for path in paths]
        )
        if "train" not in groups or len(groups) == 1:
            return None
    fix = f"or put all files together: longstride data prepare {shlex.quote(str(folder))} STORE --join"
    missing = {"train"} | (set() if valid_from_train else {"valid"})
    for name in sorted(missing - set(groups)):
        named = " and ".join(f"{split} ({members[0].relative_to(folder)})" for split, members in groups.items())
        raise ValueError(f"{folder} has files named for {named}, and none for {name}; add or rename some, {fix}")
    used = {path for members in groups.values() for path in members}
    left = [path for path in paths if path not in used]
    if size_of(left) > size_of(used):
        raise ValueError(
            f"{folder}: most of its bytes have no split in their names ({some_names(folder, left)}), while others have; "
            f"name them train, valid or test, move them away, {fix}"
        )
    return groups


def _groups(paths: Sequence[Path], splits: Sequence[str | None]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for path, split in zip(paths, splits, strict=True):
        if split:
            groups.setdefault(split, []).append(path)
    return {name: groups[name] for name in SPLITS if name in groups}


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def some_names(folder: Path, paths: Sequence[Path]) -> str:
    """Names of the first three."""
    names = ", ".join(str(path.relative_to(folder)) for path in paths[:3])
    return names if len(paths) <= 3 else f"{names} and {len(paths) - 3:,} more"


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
