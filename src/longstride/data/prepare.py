"""Prepares a store from files of any supported kind.

longstride data prepare enwik8.zip prepared/enwik8
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.text import Text

from longstride.common.checks import printable
from longstride.common.console import Progress, StandardError, print_line
from longstride.common.files import check_source, real_path, walk
from longstride.data.hashes import cached_sha256, data_cache
from longstride.data.kind import DataKind
from longstride.data.kinds import KINDS, all_kinds, kind_class
from longstride.data.limits import Limit
from longstride.data.plan import Bytes, Plan, data_suffix, files_under, list_names, total_size
from longstride.data.store import MANIFEST, VERSION, Store, check_target, open_store, write_store
from longstride.data.streams import read_start

ANYTHING = "bytes"
"""The kind that every file fits. A folder is read as this kind only if the user says so."""
START = 12
"""Bytes at the start of a file that tell its format."""


def prepare(
    source: str | Path,
    out: str | Path,
    kind: str | None = None,
    progress: bool = True,
    max_bytes: int | None = None,
    join: bool = False,
) -> Store:
    """Reads a file or folder and writes the store `out`. Without `kind`, the kind is guessed from the content.

    Files or folders named train, valid and test become these splits, unless `join` is true. Files that are left out, for
    their name or their kind, are listed on stderr and in the manifest. Without `kind`, a folder is refused if most of its
    bytes would be left out.

    The source may decompress to `max_bytes`; by default to 1 GiB, or 100 times its size if that is more. `out` appears only
    when it is complete.
    """
    source, out = check_source(source), Path(out)
    with _naming_source(source):
        limit = Limit(source, max_bytes)
    check_target(out)
    if source.is_dir() and real_path(out).is_relative_to(real_path(source)):
        raise ValueError(f"{out} lies in the source, {source}; give a folder outside of it")
    with _naming_source(source):
        chosen_kind = _choose_kind(source, kind)
    console = StandardError()
    try:
        looking = Text(f"looking at {printable(str(source))}")
        status = console.status(looking) if progress and console.is_terminal else nullcontext()
        with _naming_source(source), status:
            plan = _report_unused(source, _plan(source, kind_class(chosen_kind), limit, join), chosen=kind is not None)
            _report_links(source, plan)
            remark = kind_class(chosen_kind).remark(source) if kind is None and source.is_file() else None
            if remark is not None:
                print_line(StandardError(), f"{source}: {remark}")
        with Progress(plan.total, console, name=source.name, shown=progress, plain_lines=False) as bar:

            def with_progress(pieces: Iterable[Bytes] | Bytes) -> Iterator[Bytes]:
                with _naming_source(source):
                    for piece in [pieces] if isinstance(pieces, np.ndarray) else pieces:
                        yield piece
                        bar.advance(piece.size)

            splits = {name: with_progress(pieces) for name, pieces in plan.splits.items()}
            return write_store(out, plan.kind, splits, plan.item, plan.rate, plan.source)
    except MemoryError:
        raise ValueError(f"{source} needs more memory than is available; give it in smaller files") from None


@contextmanager
def _naming_source(source: Path) -> Iterator[None]:
    """Context in which an error of the system about a file of the source is a ValueError that names both."""
    try:
        yield
    except OSError as error:
        file = f": {error.filename}" if error.filename not in (None, str(source), source) else ""
        raise ValueError(f"{source} cannot be read: {error.strerror or error}{file}") from None


def _plan(source: Path, kind: type[DataKind], limit: Limit, join: bool) -> Plan:
    others = [suffix for other in all_kinds() if other is not kind for suffix in other.suffixes]
    return kind.plan(source, limit, join, others)


def _report_unused(source: Path, plan: Plan, chosen: bool) -> Plan:
    """Reports the files of a folder that the plan leaves out, on stderr and in the returned plan."""
    used = set(plan.used)
    left = [path for path in files_under(source) if path not in used] if source.is_dir() else []
    if not left:
        return plan
    names = list_names(source, left)
    if not chosen and total_size(left) > total_size(used):
        raise ValueError(
            f"{source} would be read as {plan.kind}, and most of its bytes are something else ({names}); move them away, or "
            f"{_ask()}"
        )
    line = f"left out, {total_size(left):,} of {total_size(left) + total_size(used):,} bytes: {names}"
    print_line(StandardError(), f"{source}: {line}")
    return replace(plan, source=f"{plan.source}; {line}")


def _report_links(source: Path, plan: Plan) -> None:
    """Reports files outside of a folder that become data through a link, and linked folders, which do not."""
    if not source.is_dir():
        return
    used = set(plan.used)
    links = sorted(path for path in walk(source) if path.is_symlink())
    outside = [path for path in links if path in used and not real_path(path).is_relative_to(real_path(source))]
    if outside:
        names = f"{list_names(source, outside)}, to {real_path(outside[0])}"
        line = f"read through links that lead out of it, {len(outside):,} of {len(used):,} files: {names}"
        print_line(StandardError(), f"{source}: {line}")
    folders = [path for path in links if path.is_dir()]
    if folders:
        print_line(StandardError(), f"{source}: links to folders are not followed: {list_names(source, folders)}")


def open_data(path: str | Path, cache: str | Path | None = None, kind: str | None = None, progress: bool = True) -> Store:
    """Opens a store. Any other source is prepared once, in the cache, and opened from there later.

    The cache is ~/.cache/longstride/data, or $LONGSTRIDE_CACHE/data.
    """
    path = check_source(path)
    if path.is_dir() and (path / MANIFEST).is_file():
        return open_store(path)
    cache = data_cache() if cache is None else Path(cache)
    with _naming_source(path):
        place = cache / f"{real_path(path).name}-{_fingerprint(path, kind, cache, progress)}"
    if place.is_dir():
        try:
            return replace(open_store(place), given=path)
        except ValueError as error:
            raise ValueError(f"the cache is damaged, remove {place}: {error}") from None
    try:
        check_target(place)
        cache.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        what = f"{cache} cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
        fix = "set LONGSTRIDE_CACHE to a folder for prepared data, or use longstride data prepare SOURCE STORE"
        raise ValueError(f"{what}; {fix}") from None
    return replace(prepare(path, place, kind, progress), given=path)


def guess_kind(source: str | Path) -> str:
    """Returns the name of the kind, from names and first bytes; ValueError if they do not tell."""
    source = check_source(source)
    return _guess_folder(source) if source.is_dir() else _guess_file(source)


def _guess_file(path: Path) -> str:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    kinds = all_kinds()
    if named := [kind for kind in kinds if data_suffix(path) in kind.suffixes]:
        return named[0].name
    start = read_start(path, False, START)
    for kind in kinds:
        if problem := kind.describe_misnamed(start):
            raise ValueError(f"{path} {problem}")
    recognized = next((kind for kind in kinds if kind.recognizes(path)), None)
    if recognized is None:  # All kinds refuse only compressed files.
        raise ValueError(f"{path} holds compressed data that is no text; unpack it first, or {_ask()}")
    return recognized.name


def _guess_folder(folder: Path) -> str:
    paths, kinds = files_under(folder), all_kinds()
    # Kinds without suffixes last: "images (.png), sound (.wav) and text".
    *first, last = sorted((kind.looked_for() for kind in kinds if kind.name != ANYTHING), key=lambda text: "(" not in text)
    looked = f"looked for {', '.join(first)} and {last}"
    if not paths:
        raise ValueError(f"{folder} holds no files; {looked}")
    named = {kind: path for kind in kinds for path in reversed(paths) if data_suffix(path) in kind.suffixes}
    if len(named) > 1:
        contents = " and ".join(f"{kind.label} ({path.name})" for kind, path in named.items())
        raise ValueError(f"{folder} holds {contents}; {_ask()}")
    recognized = next(iter(named), None) or next((kind for kind in kinds if kind.recognizes_folder(folder, paths)), None)
    if recognized is None:
        others = [path for path in paths if not kind_class("text").recognizes(path)]
        if texts := len(paths) - len(others):
            files = f"{texts:,} file{'s' if texts > 1 else ''} of text, and others: {list_names(folder, others)}"
            raise ValueError(f"{folder} holds {files}; move the others away, or, if all of it is data, {_ask()}")
        raise ValueError(f"{folder} holds nothing known ({others[0].name}); {looked}. If all of it is data, {_ask()}")
    return recognized.name


def _ask() -> str:
    *first, last = KINDS
    return f"say which kind it is: longstride data prepare SOURCE STORE --kind {', '.join(first)} or {last}"


def _choose_kind(source: Path, kind: str | None) -> str:
    if kind is None:
        return guess_kind(source)
    if kind not in KINDS:
        raise ValueError(f"{source}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def _fingerprint(path: Path, kind: str | None, cache: Path, progress: bool) -> str:
    """Returns a hash of the files' location, names and content, and of the store's format version."""
    members = files_under(path) if path.is_dir() else [path]
    Limit(path)  # Refuses holes, which could take hours to hash.
    lines = [f"{VERSION} {kind} {real_path(path)} {cached_sha256(members, cache, progress) if members else ''}"]
    lines += [f"{member.relative_to(path)} {member.stat().st_size}" for member in members]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]
