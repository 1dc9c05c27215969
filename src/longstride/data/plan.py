"""Plan of a store before it is written: the kind of data and the source of each split. Splits by file names."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longstride.common.files import walk

Bytes = NDArray[np.uint8]
SPLITS = ("train", "valid", "test")
READ = 1 << 22
"""Bytes that are read at a time."""
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
    "development": "valid",
    "test": "test",
    "tests": "test",
    "testing": "test",
}
SET_WORD = re.compile("([a-z]+?)(set|data|split)")
"""A word such as trainset or testdata."""
COMPRESSED = (".gz", ".xz", ".bz2")


@dataclass(frozen=True)
class Plan:
    """A store that is to be written."""

    kind: str
    splits: dict[str, Iterable[Bytes] | Bytes]
    """The pieces of each split; they are read while the store is written."""
    total: int
    """Bytes of all splits, possibly an estimate: for the progress bar."""
    source: str
    item: tuple[int, ...] = ()
    rate: int | None = None
    used: Sequence[Path] = ()
    """The files of a folder that are read. All others are left out."""


def split_sizes(owner: object, count: int, nouns: str) -> dict[str, int]:
    """Returns the split sizes: 90, 5 and 5 per cent of `count`, and at least one for each split."""
    if count < 3:
        raise ValueError(f"{owner} holds {count} {nouns}; at least 3 are needed, for train, valid and test")
    part = max(1, count * 5 // 100)
    return {"train": count - 2 * part, "valid": part, "test": part}


def split_of(name: str) -> str | None:
    """Returns the split that a name contains, such as valid for 'piano-valid.u8'; None if there is none."""
    splits = set(filter(None, map(_split_of_word, _words(name))))
    return splits.pop() if len(splits) == 1 else None


def exact_split(name: str) -> str | None:
    """Returns the split of a name whose stem has no other word, such as train for 'train-02.txt.gz'; None otherwise."""
    words = _words(name.partition(".")[0])
    return split_of(name) if len(words) == 1 and _split_of_word(words[0]) else None


def _words(name: str) -> list[str]:
    """Returns the words of a name in lower case: train and set for 'TrainSet'."""
    return re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower())


def _split_of_word(word: str) -> str | None:
    compound = SET_WORD.fullmatch(word)
    return SPLIT_WORDS.get(word) or (SPLIT_WORDS.get(compound[1]) if compound else None)


def named_splits(folder: Path, paths: Sequence[Path], valid_from_train: bool = False) -> dict[str, list[Path]] | None:
    """Groups files by the splits in the names of files or folders; None if there are no such names.

    Names directly in `folder` count, or in the one folder in it that holds all files. If every split found there has an
    exact name, such as train.txt or valid/, only exact names count, and 'training-notes.txt' has no split. If no name there
    contains valid or test, exact names at deeper levels count, provided that they include train and another split.

    Files without a split are left out. ValueError if they have more bytes than the others, or if train or valid is missing:
    data that is held out, by whatever name, must not become training data by accident. `valid_from_train`: whether valid may
    be missing.
    """
    names = _relative_names(folder, paths)
    groups = _groups(paths, [split_of(parts[0]) for parts in names])
    exact = _groups(paths, [exact_split(parts[0]) for parts in names])
    if set(exact) == set(groups):
        groups = exact
    if set(groups) <= {"train"}:
        groups = _groups(paths, [next(filter(None, map(exact_split, parts)), None) for parts in names])
        if "train" not in groups or len(groups) == 1:
            if len(exact.get("train", paths)) == len(paths):
                return None
            groups = exact  # Perhaps train.txt and heldout.txt.
    fix = f"or put all files together: longstride data prepare {shlex.quote(str(folder))} STORE --join"
    missing = {"train"} | (set() if valid_from_train else {"valid"})
    for name in sorted(missing - set(groups)):
        named = " and ".join(f"{split} ({members[0].relative_to(folder)})" for split, members in groups.items())
        raise ValueError(f"{folder} has files named for {named}, and none for {name}; add or rename some, {fix}")
    used = {path for members in groups.values() for path in members}
    left = [path for path in paths if path not in used]
    if total_size(left) > total_size(used):
        raise ValueError(
            f"{folder}: most of its bytes have no split in their names ({list_names(folder, left)}), while others have; "
            f"name them train, valid or test, move them away, {fix}"
        )
    return groups


def _relative_names(folder: Path, paths: Sequence[Path]) -> list[tuple[str, ...]]:
    """Returns the parts of each path below `folder`, without folders around all of them that name no split."""
    names = [path.relative_to(folder).parts for path in paths]
    while all(len(parts) > 1 for parts in names) and len({parts[0] for parts in names}) == 1 and not split_of(names[0][0]):
        names = [parts[1:] for parts in names]
    return names


def _groups(paths: Sequence[Path], splits: Sequence[str | None]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for path, split in zip(paths, splits, strict=True):
        if split:
            groups.setdefault(split, []).append(path)
    return {name: groups[name] for name in SPLITS if name in groups}


def total_size(paths: Iterable[Path]) -> int:
    """Returns the bytes of all files together."""
    return sum(path.stat().st_size for path in paths)


def list_names(folder: Path, paths: Sequence[Path]) -> str:
    """Returns the first three names and the number of the others."""
    names = ", ".join(str(path.relative_to(folder)) for path in paths[:3])
    return names if len(paths) <= 3 else f"{names} and {len(paths) - 3:,} more"


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, by its suffix."""
    return path.suffix.lower() in COMPRESSED


def data_suffix(path: Path) -> str:
    """Returns the suffix in lower case, ignoring that of the compression: .u8 for 'piano.u8.xz'."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def files_under(folder: Path, endings: Sequence[str] = ()) -> list[Path]:
    """Returns every file below a folder, sorted, without hidden ones. `endings`: only files with these suffixes."""
    paths = []
    for path in walk(folder):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and (not endings or data_suffix(path) in endings):
            paths.append(path)
    return sorted(paths)
