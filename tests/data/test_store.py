import hashlib
import json
import resource

import numpy as np
import pytest

from longstride.data import store as module
from longstride.data.kinds import KINDS
from longstride.data.store import open_store, verify, write_store


def some(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    write_store(tmp_path / "made", "text", {"train": some(90), "valid": some(5, 1), "test": some(7, 2)}, source="a test")
    return tmp_path / "made"


def test_comes_back(folder):
    store = open_store(folder)
    assert (store.kind, store.item, store.rate, store.source, store.item_bytes) == ("text", (), None, "a test", None)
    assert store.splits == {"train": 90, "valid": 5, "test": 7}
    assert np.array_equal(store.split("train"), some(90))
    assert store.sha256["valid"] == hashlib.sha256(some(5, 1).tobytes()).hexdigest()
    assert not store.split("test").flags.writeable
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "test.bin", "train.bin", "valid.bin"]
    verify(store)


def test_pieces_and_order(tmp_path):
    pieces = {"valid": iter([some(12)]), "train": (some(12, seed) for seed in range(3))}
    store = write_store(tmp_path / "deep" / "made", "images", pieces, item=(2, 2, 3))
    assert list(store.splits.items()) == [("train", 36), ("valid", 12)]
    assert store.item_bytes == 12
    assert np.array_equal(open_store(store.folder).split("train"), np.concatenate([some(12, seed) for seed in range(3)]))
    with pytest.raises(ValueError, match=r"made: there is no split 'test'; it has train, valid"):
        store.split("test")


def test_a_failure_leaves_nothing(tmp_path):
    def broken():
        yield some(10)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_store(tmp_path / "made", "bytes", {"train": broken(), "valid": some(2)})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_store(tmp_path / "made", "bytes", {"train": some(10), "valid": some(2)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "video"}, f"kind must be one of {', '.join(KINDS)}, got 'video'"),
        ({"item": (2, 2)}, r"item of text must be empty, got \[2, 2\]"),
        ({"kind": "images"}, r"item of images must be \[height, width, channels\], got \[\]"),
        ({"kind": "images", "item": (1, 4, 3)}, "split 'train' has 10 bytes, no multiple of an item's 12"),
        ({"kind": "audio"}, "rate must be a whole number of at least 1, got None"),
        ({"rate": 12000}, "rate is for audio, got 12000 with text"),
        ({"splits": {"train": some(3)}}, "split 'valid' is required, got train"),
        ({"splits": {"train": some(3), "dev": some(3)}}, "splits must be among train, valid, test, got 'dev'"),
        ({"splits": {"train": some(3), "valid": some(0)}}, "split 'valid' is empty"),
        ({"splits": {"train": some(3).astype(float), "valid": some(3)}}, "train.bin: a store holds uint8, got float64"),
    ],
)
def test_wrong_stores_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        write_store(tmp_path / "made", **({"kind": "text", "splits": {"train": some(10), "valid": some(2)}} | change))
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept(folder, tmp_path):
    same = {"train": some(90), "valid": some(5, 1), "test": some(7, 2)}
    assert write_store(folder, "text", same, source="again").source == "a test"
    with pytest.raises(ValueError, match="already holds other data; remove it or give another folder"):
        write_store(folder, "text", same | {"train": some(91)})
    verify(open_store(folder))
    (tmp_path / "mine").mkdir()
    assert write_store(tmp_path / "mine", "text", same).splits["train"] == 90
    (tmp_path / "yours").mkdir()
    (tmp_path / "yours" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="yours is not empty and holds no prepared data"):
        write_store(tmp_path / "yours", "text", same)
    with pytest.raises(ValueError, match=r"letter.txt is a file; give the folder"):
        write_store(tmp_path / "yours" / "letter.txt", "text", same)
    with pytest.raises(ValueError, match=r"letter.txt/a/b cannot be written: .*letter.txt is a file"):
        write_store(tmp_path / "yours" / "letter.txt" / "a" / "b", "text", same)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "mine", "yours"]


def test_another_process_may_be_first(tmp_path, monkeypatch):
    data = {"train": some(90), "valid": some(5)}
    rename = module.os.rename

    def late(source, target):
        rename(source, target)
        source.mkdir()
        (source / "manifest.json").write_text("{}")
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", late)
    store = write_store(tmp_path / "made", "text", data)
    assert store.splits == {"train": 90, "valid": 5}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("size", [0, 89, 91])
def test_a_split_that_was_cut(folder, size):
    (folder / "train.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"train.bin has {size} bytes; manifest.json says 90"):
        open_store(folder)


def test_changed_bytes_are_found(folder):
    (folder / "valid.bin").write_bytes(bytes(5))
    with pytest.raises(ValueError, match=r"valid.bin has SHA-256 .*; manifest.json says"):
        verify(open_store(folder))
    verify(open_store(folder), ["train"])
    (folder / "valid.bin").unlink()
    with pytest.raises(ValueError, match=r"valid.bin is missing; manifest.json names it, with 5 bytes"):
        open_store(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "has version 2; this release reads version 1"),
        (lambda m: m.pop("version"), "is no manifest of prepared data: it has no version"),
        (lambda m: m.pop("item"), "item is missing"),
        (lambda m: m.update(kind="smell"), "kind must be one of"),
        (lambda m: m.update(splits=[]), "splits must be a dict"),
        (lambda m: m["splits"].pop("valid"), "split 'valid' is required"),
        (
            lambda m: m["splits"].update({"../../etc": {"bytes": 1, "sha256": ""}}),
            r"splits must be among .*, got '../../etc'",
        ),
        (lambda m: m["splits"]["train"].pop("sha256"), "split 'train' must have bytes and sha256"),
        (lambda m: m["splits"]["train"].update(bytes="90"), "bytes of train must be a whole number"),
    ],
)
def test_the_manifest_is_checked(folder, change, message):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"manifest.json.* {message}"):
        open_store(folder)


def test_no_manifest(folder, tmp_path):
    (folder / "manifest.json").write_bytes(b"\xff{")
    with pytest.raises(ValueError, match=r"manifest.json is (not JSON|no UTF-8 text)"):
        open_store(folder)
    with pytest.raises(ValueError, match=r"is no prepared data: it has no manifest.json"):
        open_store(tmp_path)
