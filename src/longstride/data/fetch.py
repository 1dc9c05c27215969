"""Downloads the paper's public data sets, with resumption and a SHA-256 check.

longstride data fetch enwik8
"""

import http.client
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from longstride.common.atomic import check_output, check_writable
from longstride.common.checks import suggest
from longstride.common.console import Progress
from longstride.common.files import file_sha256

CHUNK = 2**18
TIMEOUT = 60.0
"""Seconds without a response after which the connection fails."""


@dataclass(frozen=True)
class Source:
    """A file for download that never changes, with its exact size and SHA-256."""

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


def fetch(name: str, folder: str | Path, progress: bool = True, force: bool = False) -> Path:
    """Returns the archive of a data set in `folder`, downloaded if it is missing or incomplete. It stays compressed.

    Downloads into a file with the suffix .part until its SHA-256 is right. A later call resumes that file.
    `force`: a file of that name with other content may be replaced.
    """
    if name not in SOURCES:
        raise ValueError(f"fetch: there is no data set {name!r}; {suggest(name, SOURCES)}")
    source = SOURCES[name]
    path = Path(folder) / source.file
    if path.is_file() and path.stat().st_size == source.size and file_sha256(path) == source.sha256:
        return path
    if not path.parent.exists():
        check_writable("fetch", "folder", path)  # Makes the folder.
    check_output("fetch", "folder", path, may_replace=force)
    part = path.with_name(path.name + ".part")
    _download(source, part, progress)
    digest = file_sha256(part)
    if digest != source.sha256:
        part.unlink()
        raise ValueError(
            f"fetch: {source.address} gave a file with SHA-256 {digest}, not {source.sha256}; "
            "it was deleted, run it again to start anew"
        )
    os.replace(part, path)
    return path


def _download(source: Source, part: Path, progress: bool) -> None:
    """Appends to `part` until it is complete; OSError if the connection ends early."""
    # A part of full length only needs the check. A longer one is no part of this file.
    received = part.stat().st_size if part.exists() else 0
    if received == source.size:
        return
    if received > source.size:
        received = 0
    with _request(source, received) as response:
        received = _response_start(source, response, received)
        progress_bar = Progress(source.size, name=source.name, done=received, shown=progress, plain_lines=False)
        with progress_bar as bar, part.open("r+b" if received else "wb") as file:
            file.seek(received)
            for chunk in _chunks(source, response, source.size - received):
                file.write(chunk)
                received += len(chunk)
                bar.update(received)
    if received < source.size:
        raise OSError(_stopped(source, f"the connection ended after {received:,} of {source.size:,} bytes"))


def _request(source: Source, received: int) -> http.client.HTTPResponse:
    """Requests the bytes from `received` on and returns the response."""
    headers = {"User-Agent": "longstride"} | ({"Range": f"bytes={received}-"} if received else {})
    try:
        response: http.client.HTTPResponse = urlopen(Request(source.address, headers=headers), timeout=TIMEOUT)
        return response
    except HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and received:
            return _request(source, 0)
        raise OSError(_stopped(source, f"the server answers {error.code} {error.reason}")) from None
    except URLError as error:
        raise OSError(_stopped(source, f"it cannot be reached: {error.reason}")) from None
    except (OSError, http.client.HTTPException) as error:
        raise OSError(_stopped(source, _reason(error))) from None


def _response_start(source: Source, response: http.client.HTTPResponse, received: int) -> int:
    """Returns the position of the response's first byte: 0 from a server without support for ranges."""
    start = received if response.status == http.client.PARTIAL_CONTENT else 0
    given = response.headers.get("Content-Range", f"bytes {start}-")
    length = response.headers.get("Content-Length", str(source.size - start))
    # A page that says "moved" or "log in" also has status 200.
    if not given.startswith(f"bytes {start}-") or length != str(source.size - start):
        raise OSError(
            f"fetch: {source.address} offers {length} bytes ({given}), not the {source.size - start} that are missing; "
            f"download {source.file} by hand into the same folder"
        )
    return start


def _chunks(source: Source, response: http.client.HTTPResponse, most: int) -> Iterator[bytes]:
    """Yields what arrives, up to `most` bytes. Catches network errors only, not those of a full disk."""
    while most:
        try:
            chunk = response.read1(min(CHUNK, most))  # Returns what has arrived, without waiting for a full chunk.
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
