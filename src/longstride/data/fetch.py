"""The paper's public data sets, downloaded once: resumed where they were cut, checked before they are used.

longstride data fetch enwik8
"""

import hashlib
import http.client
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from longstride.common.atomic import writable
from longstride.common.checks import suggest
from longstride.common.console import byte_bar

CHUNK = 2**18
TIMEOUT = 60.0
"""Seconds without an answer after which a server counts as gone."""


@dataclass(frozen=True)
class Source:
    """A file that never changes: what its server sends has exactly these bytes."""

    name: str
    address: str
    file: str
    size: int
    sha256: str


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="enwik8",
            address="http://mattmahoney.net/dc/enwik8.zip",
            file="enwik8.zip",
            size=36_445_475,
            sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
        Source(
            name="cifar10",
            address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            file="cifar-10-python.tar.gz",
            size=170_498_071,
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    )
}


def fetch(name: str, folder: str | Path, progress: bool = True) -> Path:
    """The archive of that data set in `folder`, downloaded if it is not there whole. It stays packed.

    What has arrived is in a file that ends in .part until its SHA-256 is right. A later call goes on from there.
    """
    if name not in SOURCES:
        raise ValueError(f"fetch: there is no data set {name!r}; {suggest(name, SOURCES)}")
    source = SOURCES[name]
    path = writable("fetch", "folder", Path(folder) / source.file)
    if path.is_file() and path.stat().st_size == source.size and _sha256(path) == source.sha256:
        return path
    part = path.with_name(path.name + ".part")
    _download(source, part, progress)
    found = _sha256(part)
    if found != source.sha256:
        part.unlink()
        raise ValueError(
            f"fetch: {source.address} gave a file with SHA-256 {found}, not {source.sha256}; "
            "it was deleted, run it again to start anew"
        )
    os.replace(part, path)
    return path


def _download(source: Source, part: Path, progress: bool) -> None:
    """Adds to `part` until it has all bytes, or says where it stopped."""
    # One of the full length is only left to be checked. A longer one is no beginning of this file.
    have = part.stat().st_size if part.exists() else 0
    if have == source.size:
        return
    if have > source.size:
        have = 0
    with byte_bar(progress) as bar:
        task = bar.add_task(source.name, total=source.size)
        with _ask(source, have) as answer:
            have = _start(source, answer, have)
            bar.update(task, completed=have)
            with part.open("r+b" if have else "wb") as file:
                file.seek(have)
                for chunk in _chunks(source, answer, source.size - have):
                    file.write(chunk)
                    have += len(chunk)
                    bar.update(task, completed=have)
    if have < source.size:
        raise OSError(_stopped(source, f"the connection ended after {have:,} of {source.size:,} bytes"))


def _ask(source: Source, have: int) -> http.client.HTTPResponse:
    """The server's answer to a request for what comes after the first `have` bytes."""
    headers = {"User-Agent": "longstride"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer: http.client.HTTPResponse = urlopen(Request(source.address, headers=headers), timeout=TIMEOUT)
        return answer
    except HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return _ask(source, 0)
        raise OSError(_stopped(source, f"the server answers {error.code} {error.reason}")) from None
    except URLError as error:
        raise OSError(_stopped(source, f"it cannot be reached: {error.reason}")) from None
    except (OSError, http.client.HTTPException) as error:
        raise OSError(_stopped(source, _reason(error))) from None


def _start(source: Source, answer: http.client.HTTPResponse, have: int) -> int:
    """The position of the answer's first byte. A server that does not know ranges sends the file from the start."""
    start = have if answer.status == http.client.PARTIAL_CONTENT else 0
    given = answer.headers.get("Content-Range", f"bytes {start}-")
    length = answer.headers.get("Content-Length", str(source.size - start))
    # A page that says "moved" or "log in" also comes with the status of success.
    if not given.startswith(f"bytes {start}-") or length != str(source.size - start):
        raise OSError(
            f"fetch: {source.address} offers {length} bytes ({given}), not the {source.size - start} that are missing; "
            f"download {source.file} by hand into the same folder"
        )
    return start


def _chunks(source: Source, answer: http.client.HTTPResponse, most: int) -> Iterator[bytes]:
    """What arrives, up to `most` bytes. Only reading is guarded: a full disk is no fault of the network."""
    while most:
        try:
            chunk = answer.read1(min(CHUNK, most))  # What is there, without waiting for a whole chunk that may never come.
        except (OSError, http.client.HTTPException) as error:
            raise OSError(_stopped(source, _reason(error))) from None
        if not chunk:
            return
        most -= len(chunk)
        yield chunk


def _stopped(source: Source, why: str) -> str:
    return f"fetch: {source.address}: {why}; what has arrived is kept, run it again to go on from there"


def _reason(error: Exception) -> str:
    return f"the connection broke: {str(error) or type(error).__name__}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
