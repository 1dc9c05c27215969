import hashlib
import os

import pytest

from longstride.data import hashes
from longstride.data.hashes import cached_sha256
from longstride.data.store import open_store, verify_once, write_store
from tests.data.test_store import some


@pytest.fixture
def settled(monkeypatch):
    """Files that were written just now count as old."""
    monkeypatch.setattr(hashes, "SETTLED", -(10**18))


@pytest.fixture
def readings(monkeypatch):
    """The files that were read, in order."""
    found, compute = [], hashes._hash
    monkeypatch.setattr(hashes, "_hash", lambda paths, progress: found.extend(paths) or compute(paths, progress))
    return found


def put_back(path, content):
    """Other content at the same size and mtime."""
    before = path.stat()
    path.write_bytes(content)
    while path.stat().st_ctime_ns == before.st_ctime_ns or path.stat().st_mtime_ns != before.st_mtime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # Until the clock of the file system ticks.
    assert path.stat().st_size == before.st_size


def test_a_hash_is_remembered_until_the_file_changes(tmp_path, settled, readings):
    path, cache = tmp_path / "a", tmp_path / "cache"
    path.write_bytes(b"one")
    for _ in range(2):
        assert cached_sha256([path], cache) == hashlib.sha256(b"one").hexdigest()
    assert readings == [path]
    put_back(path, b"two")
    assert cached_sha256([path], cache) == hashlib.sha256(b"two").hexdigest()
    (tmp_path / "b").write_bytes(b"three")
    assert cached_sha256([path, tmp_path / "b"], cache) == hashlib.sha256(b"twothree").hexdigest()


def test_a_file_that_has_just_changed_is_read_again(tmp_path, readings):
    (tmp_path / "a").write_bytes(b"one")
    for _ in range(2):
        cached_sha256([tmp_path / "a"], tmp_path / "cache")
    assert len(readings) == 2
    assert not (tmp_path / "cache").exists()


def test_what_is_remembered_is_checked(tmp_path, settled, readings):
    (tmp_path / "a").write_bytes(b"one")
    digest = cached_sha256([tmp_path / "a"], tmp_path / "cache")
    [memory] = (tmp_path / "cache" / ".sha256").iterdir()
    for content in (b"", b"\xff\xfe", digest[:-1].encode()):
        memory.write_bytes(content)
        assert cached_sha256([tmp_path / "a"], tmp_path / "cache") == digest
    assert len(readings) == 4


def test_a_cache_that_cannot_be_written(tmp_path, settled, readings):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "cache").touch()
    for _ in range(2):
        assert cached_sha256([tmp_path / "a"], tmp_path / "cache") == hashlib.sha256(b"one").hexdigest()
    assert len(readings) == 2


def test_a_bar_for_large_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "a.bin").write_bytes(bytes(1000))
    cached_sha256([tmp_path / "a.bin"], tmp_path / "cache")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(hashes, "LARGE", 1000)
    cached_sha256([tmp_path / "a.bin"], tmp_path / "cache")
    assert "checking a.bin" in capsys.readouterr().err


def test_a_store_is_verified_once(tmp_path, monkeypatch, settled, readings):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    write_store(tmp_path / "made", "text", {"train": some(90), "valid": some(5, 1)})
    for _ in range(2):
        verify_once(open_store(tmp_path / "made"))
    assert [path.name for path in readings] == ["train.bin", "valid.bin"]
    assert (tmp_path / "cache" / "data" / ".sha256").is_dir()
    put_back(tmp_path / "made" / "train.bin", some(90)[::-1].tobytes())
    verify_once(open_store(tmp_path / "made"), ["valid"])
    with pytest.raises(ValueError, match=r"train.bin has SHA-256 .*; manifest.json says .* Prepare the data again"):
        verify_once(open_store(tmp_path / "made"))
