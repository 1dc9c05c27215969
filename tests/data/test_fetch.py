"""Against a server of our own, in a thread, that behaves as badly as each test asks."""

import hashlib
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from longstride.data import fetch as module
from longstride.data.fetch import SOURCES, Source, fetch

CONTENT = np.random.default_rng(0).bytes(100_000)


@dataclass
class Server:
    address: str
    content: bytes = CONTENT
    ranges: bool = True
    cut: int | None = None
    """How many bytes of an answer are sent before the connection is closed."""
    status: int | None = None
    """Answered to everything."""
    asked: list[str | None] = field(default_factory=list)
    """The Range of each request."""

    def answer(self, handler):
        wanted = handler.headers.get("Range")
        self.asked.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if self.status or start >= len(self.content):
            handler.send_error(self.status or 416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.send_header("Content-Length", str(len(self.content) - start))
        handler.end_headers()
        handler.wfile.write(self.content[start:][: self.cut])


@pytest.fixture
def server(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            settings.answer(self)

        def log_message(self, *arguments):
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    settings = Server(f"http://127.0.0.1:{listener.server_port}/thing.zip")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    source = Source("thing", settings.address, "thing.zip", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(SOURCES, "thing", source)
    monkeypatch.setattr(module, "CHUNK", 1_000)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield settings
    listener.shutdown()
    listener.server_close()
    thread.join()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_downloads_once(server, tmp_path, capsys):
    path = fetch("thing", tmp_path / "new", progress=False)
    assert path == tmp_path / "new" / "thing.zip"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["thing.zip"]
    assert fetch("thing", str(tmp_path / "new"), progress=False) == path
    assert server.asked == [None]
    assert capsys.readouterr() == ("", "")


def test_a_bar_leaves_standard_output_alone(server, tmp_path, capsys):
    fetch("thing", tmp_path)
    assert capsys.readouterr().out == ""


def test_goes_on_after_a_cut_connection(server, tmp_path):
    server.cut = 30_500
    with pytest.raises(OSError, match=r"thing.zip: the connection .*; what has arrived is kept, run it again to go on"):
        fetch("thing", tmp_path, progress=False)
    assert names(tmp_path) == ["thing.zip.part"]
    assert (tmp_path / "thing.zip.part").read_bytes() == CONTENT[:30_500]
    with pytest.raises(OSError, match="run it again"):
        fetch("thing", tmp_path, progress=False)
    server.cut = None
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=30500-", "bytes=61000-"]
    assert names(tmp_path) == ["thing.zip"]


def test_a_cut_names_how_far_it_came(server, tmp_path):
    server.cut = 30_500
    with pytest.raises(OSError, match=r"30,500 of 100,000 bytes|IncompleteRead") as caught:
        fetch("thing", tmp_path, progress=False)
    assert "\n" not in str(caught.value)


def test_a_server_without_ranges_starts_anew(server, tmp_path):
    (tmp_path / "thing.zip.part").write_bytes(b"x" * 99_999)
    server.ranges = False
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT
    assert server.asked == ["bytes=99999-"]


def test_a_range_that_is_refused_starts_anew(server, tmp_path):
    (tmp_path / "thing.zip.part").write_bytes(CONTENT[:50_000])
    original = server.answer

    def refusing(handler):
        server.status = 416 if handler.headers.get("Range") else None
        original(handler)

    server.answer = refusing
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT
    assert server.asked == ["bytes=50000-", None]


@pytest.mark.parametrize("size", [100_001, 200_000])
def test_a_part_that_is_too_long_is_no_beginning(server, tmp_path, size):
    (tmp_path / "thing.zip.part").write_bytes(b"x" * size)
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT
    assert server.asked == [None]


def test_a_part_that_is_whole_is_checked_and_used(server, tmp_path):
    (tmp_path / "thing.zip.part").write_bytes(CONTENT)
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT
    assert server.asked == []
    assert names(tmp_path) == ["thing.zip"]


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    server.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    wrong = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(ValueError, match=f"SHA-256 {wrong}, not {SOURCES['thing'].sha256}; it was deleted"):
        fetch("thing", tmp_path, progress=False)
    assert names(tmp_path) == []


def test_a_wrong_beginning_is_found_at_the_end(server, tmp_path):
    (tmp_path / "thing.zip.part").write_bytes(b"x" * 1_000)
    with pytest.raises(ValueError, match="it was deleted, run it again to start anew"):
        fetch("thing", tmp_path, progress=False)
    assert fetch("thing", tmp_path, progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:50_000], b"x" * len(CONTENT)])
def test_a_damaged_file_stays_until_the_right_one_is_there(server, tmp_path, damaged):
    (tmp_path / "thing.zip").write_bytes(damaged)
    server.cut = 10
    with pytest.raises(OSError, match="run it again"):
        fetch("thing", tmp_path, progress=False, force=True)
    assert (tmp_path / "thing.zip").read_bytes() == damaged
    server.cut = None
    assert fetch("thing", tmp_path, progress=False, force=True).read_bytes() == CONTENT


def test_another_file_is_refused_before_a_byte_of_it_is_kept(server, tmp_path):
    server.content = b"<html>Please log in</html>"
    with pytest.raises(OSError, match=r"offers 26 bytes .* not the 100000 that are missing; download thing.zip by hand"):
        fetch("thing", tmp_path, progress=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [404, 503])
def test_an_error_of_the_server_is_one_line(server, tmp_path, status):
    server.status = status
    with pytest.raises(OSError, match=f"{server.address}: the server answers {status} .*run it again") as caught:
        fetch("thing", tmp_path, progress=False)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_no_server(server, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "thing", replace(SOURCES["thing"], address="http://127.0.0.1:1/thing.zip"))
    with pytest.raises(OSError, match=r"http://127.0.0.1:1/thing.zip: it cannot be reached: .*refused; .* run it again"):
        fetch("thing", tmp_path, progress=False)
    assert names(tmp_path) == []


def test_a_server_that_falls_silent(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.3)
    done = threading.Event()

    def silent(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:5_500])
        done.wait()

    server.answer = silent
    try:
        with pytest.raises(OSError, match="the connection broke: timed out; what has arrived is kept"):
            fetch("thing", tmp_path, progress=False)
    finally:
        done.set()
    assert (tmp_path / "thing.zip.part").read_bytes() == CONTENT[:5_500]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_no_fault_of_the_network(server, tmp_path):
    (tmp_path / "thing.zip.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch("thing", tmp_path, progress=False)
    assert "connection" not in str(caught.value)


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match="fetch: there is no data set 'enwiki8'; did you mean 'enwik8'"):
        fetch("enwiki8", tmp_path)
    with pytest.raises(ValueError, match="there is no data set 'piano'; the names are enwik8, cifar10"):
        fetch("piano", tmp_path)


def test_a_file_with_other_content_is_replaced_only_by_force(server, tmp_path):
    (tmp_path / "thing.zip").write_text("precious")
    with pytest.raises(ValueError, match=r"fetch: .*thing.zip is there already; add --force to replace it"):
        fetch("thing", tmp_path, progress=False)
    assert (names(tmp_path), server.asked) == (["thing.zip"], [])
    assert (tmp_path / "thing.zip").read_text() == "precious"
    assert fetch("thing", tmp_path, progress=False, force=True).read_bytes() == CONTENT


def test_the_folder_and_those_above_it_are_made(server, tmp_path):
    assert fetch("thing", tmp_path / "a" / "b", progress=False).read_bytes() == CONTENT
    assert names(tmp_path / "a" / "b") == ["thing.zip"]


def test_a_folder_that_is_a_file(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"fetch: folder = .* cannot be written"):
        fetch("thing", tmp_path / "file")
    assert server.asked == []


def test_the_table():
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.address.endswith("/" + source.file)
        assert len(bytes.fromhex(source.sha256)) == 32
