"""From whatever holds the data to a store of bytes.

longstride data prepare enwik8.zip prepared/enwik8
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from longstride.common.console import StandardError, byte_bar
from longstride.common.files import real_path
from longstride.data import audio, cifar, files, images, text
from longstride.data.hashes import data_cache, sha256_of
from longstride.data.limits import Limit
from longstride.data.plan import ARRAYS, PICTURES, SOUNDS, Plan, ending, files_under, size_of, some_names
from longstride.data.store import KINDS, MANIFEST, VERSION, Bytes, Store, check_target, open_store, write_store
from longstride.data.streams import beginning, packing

PLANS: dict[str, Callable[[Path, Limit, bool], Plan]] = {
    "text": text.plan,
    "images": images.plan,
    "audio": audio.plan,
    "bytes": files.plan,
}
ASK = "say which kind it is: longstride data prepare SOURCE STORE --kind text, images, audio or bytes"


def prepare(
    source: str | Path,
    out: str | Path,
    kind: str | None = None,
    progress: bool = True,
    max_bytes: int | None = None,
    join: bool = False,
) -> Store:
    """Reads a file or folder and writes the store `out`. Without `kind`, what the source is shows from its content.

    Files or folders that are named train, valid and test become these splits, unless `join` is true. What is left out, for
    its name or because it is of another kind, is named on stderr and in the manifest. Without `kind`, a folder of which the
    most bytes would be left out is refused.

    The source may unpack to `max_bytes`; by default to 1 GiB, or 100 times its size if that is more. Nothing appears at
    `out` before all of it is written.
    """
    source, out = _source(source), Path(out)
    limit = Limit(source, max_bytes)
    check_target(out)
    if source.is_dir() and real_path(out).is_relative_to(real_path(source)):
        raise ValueError(f"{out} lies in the source, {source}; give a folder outside of it")
    found = _kind(source, kind)
    bar = byte_bar(progress)
    try:
        with nullcontext() if bar.disable else bar.console.status(f"looking at {source}"):
            plan = _without_the_rest(source, PLANS[found](source, limit, join), chosen=kind is not None)
        with bar:
            task = bar.add_task(source.name, total=plan.total)

            def counted(pieces: Iterable[Bytes] | Bytes) -> Iterator[Bytes]:
                for piece in [pieces] if isinstance(pieces, np.ndarray) else pieces:
                    yield piece
                    bar.advance(task, piece.size)

            splits = {name: counted(pieces) for name, pieces in plan.splits.items()}
            return write_store(out, plan.kind, splits, plan.item, plan.rate, plan.source)
    except MemoryError:
        raise ValueError(f"{source} needs more memory than there is; give it in smaller files") from None


def _without_the_rest(source: Path, plan: Plan, chosen: bool) -> Plan:
    """The plan, once it is said what it leaves out of a folder."""
    used = set(plan.used)
    left = [path for path in files_under(source) if path not in used] if source.is_dir() else []
    if not left:
        return plan
    names = some_names(source, left)
    if not chosen and size_of(left) > size_of(used):
        raise ValueError(
            f"{source} would be read as {plan.kind}, and most of its bytes are something else ({names}); move them away, or "
            f"{ASK}"
        )
    line = f"left out, {size_of(left):,} of {size_of(left) + size_of(used):,} bytes: {names}"
    StandardError().print(f"{source}: {line}", highlight=False, markup=False, soft_wrap=True)
    return replace(plan, source=f"{plan.source}; {line}")


def open_data(path: str | Path, cache: str | Path | None = None, kind: str | None = None, progress: bool = True) -> Store:
    """A store as it is. Anything else is prepared once, into the cache, and found there the next time.

    The cache is ~/.cache/longstride/data, or the folder data in what LONGSTRIDE_CACHE names.
    """
    path = _source(path)
    if path.is_dir() and (path / MANIFEST).is_file():
        return open_store(path)
    cache = data_cache() if cache is None else Path(cache)
    place = cache / f"{real_path(path).name}-{_fingerprint(path, kind, cache, progress)}"
    if place.is_dir():
        try:
            return open_store(place)
        except ValueError as error:
            raise ValueError(f"the cache is damaged, remove {place}: {error}") from None
    return prepare(path, place, kind, progress)


def guess_kind(source: str | Path) -> str:
    """Text, images, audio or bytes, by the name and the first bytes; an error where only the user can know."""
    source = _source(source)
    return _guess_folder(source) if source.is_dir() else _guess_file(source)


def _guess_file(path: Path) -> str:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    known = ending(path)
    if known in PICTURES + ARRAYS:
        return "images"
    if known in audio.ENDINGS:
        return "audio"
    start = beginning(path, False, 12)
    if start.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"\x93NUMPY")):
        raise ValueError(f"{path} holds an image or an array; give it the ending .png, .jpg or .npy")
    if start.startswith((b"fLaC", b"OggS", b"ID3")) or (start[:4], start[8:]) == (b"RIFF", b"WAVE"):
        raise ValueError(f"{path} holds sound; give it the ending {', '.join(SOUNDS)}")
    if known == ".bin" and cifar.is_binary(path):
        return "images"
    if packing(path) == "zip":
        return "text" if text.looks_like_text(path) else _unclear(path)
    if images.is_tar(path):
        return "images"
    if text.looks_like_text(path):
        return "text"
    return _unclear(path) if packing(path) else "bytes"


def _unclear(path: Path) -> str:
    raise ValueError(f"{path} holds compressed data that is no text; unpack it first, or {ASK}")


def _guess_folder(folder: Path) -> str:
    paths = files_under(folder)
    looked = f"looked for images ({images.LOOKED_FOR}), sound ({', '.join(audio.ENDINGS)}) and text"
    if not paths:
        raise ValueError(f"{folder} holds no files; {looked}")
    if cifar.find(folder):
        return "images"
    pictures = [path for path in paths if ending(path) in PICTURES + ARRAYS]
    sounds = [path for path in paths if ending(path) in audio.ENDINGS]
    if pictures and sounds:
        raise ValueError(f"{folder} holds images ({pictures[0].name}) and sound ({sounds[0].name}); {ASK}")
    if pictures or sounds:
        return "images" if pictures else "audio"
    other = next((path for path in paths if not text.looks_like_text(path)), None)
    if other:
        raise ValueError(f"{folder} holds nothing known ({other.name}); {looked}. If all of it is data, {ASK}")
    return "text"


def _source(source: str | Path) -> Path:
    source = Path(source).expanduser()
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a file or a folder")
    if not source.is_file() and not source.is_dir():
        raise ValueError(f"{source} is no file and no folder")
    if not os.access(source, os.R_OK):
        raise ValueError(f"{source} cannot be read: permission denied")
    return source


def _kind(source: Path, kind: str | None) -> str:
    if kind is None:
        return guess_kind(source)
    if kind not in KINDS:
        raise ValueError(f"{source}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def _fingerprint(path: Path, kind: str | None, cache: Path, progress: bool) -> str:
    """Changes with the files' place, names and content, and with the form of the store."""
    members = files_under(path) if path.is_dir() else [path]
    Limit(path).check(path, "what is in its files", size_of(members))  # Else holes would be read for hours.
    lines = [f"{VERSION} {kind} {real_path(path)} {sha256_of(members, cache, progress) if members else ''}"]
    lines += [f"{member.relative_to(path)} {member.stat().st_size}" for member in members]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]
