import gzip
import os
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import soundfile
from PIL import Image

from longstride.data import hashes, kinds, samples
from longstride.data import prepare as module
from longstride.data.prepare import guess_kind, open_data, prepare
from longstride.data.store import verify
from tests.data.small import batches, binary_batch, contents, python_2_batch, some_images, write_files, write_tar
from tests.data.test_hashes import put_back

TEXT = b"to be, or not to be, that is the question\n" * 20
NOISE = np.random.default_rng(0).bytes(2000)


def a_picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(some_images(1, (4, 4, 3))[0]).save(path)


def a_sound(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.zeros(100), 12000)


def a_file(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def a_zip(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inside", content)


KINDS = [
    ("enwik8", lambda p: a_file(p, TEXT), "text"),
    ("a.json", lambda p: a_file(p, b"{}\n"), "text"),
    ("a.gz", lambda p: a_file(p, gzip.compress(TEXT)), "text"),
    ("a.zip", lambda p: a_zip(p, TEXT), "text"),
    ("a.exe", lambda p: a_file(p, NOISE), "bytes"),
    ("a.bin", lambda p: a_file(p, NOISE), "bytes"),
    ("b.bin", lambda p: a_file(p, binary_batch(some_images(4))), "images"),
    ("a.png", a_picture, "images"),
    ("a.JPG", a_picture, "images"),
    ("a.npy", lambda p: np.save(p, some_images(4)), "images"),
    ("a.npz", lambda p: np.savez(p, some_images(4)), "images"),
    ("a.tar.gz", lambda p: write_tar(p, batches(some_images(10), None, python_2_batch)), "images"),
    ("cifar", lambda p: write_files(p, batches(some_images(10), None, python_2_batch)), "images"),
    ("a.wav", a_sound, "audio"),
    ("a.flac", a_sound, "audio"),
    ("a.u8", lambda p: a_file(p, NOISE), "audio"),
    ("folder", lambda p: (a_picture(p / "x" / "a.png"), a_file(p / "labels.txt", TEXT)), "images"),
    ("folder", lambda p: (a_sound(p / "a.wav"), a_file(p / "notes.txt", TEXT)), "audio"),
    ("folder", lambda p: (a_file(p / "a.py", TEXT), a_file(p / "x" / "b.c", TEXT)), "text"),
]


@pytest.mark.parametrize(("name", "make", "kind"), KINDS)
def test_kinds_are_seen(tmp_path, name, make, kind):
    make(tmp_path / name)
    assert guess_kind(tmp_path / name) == kind


@pytest.mark.parametrize(("name", "kind"), [("text", "text"), ("piano", "audio"), ("patches", "images")])
def test_bundled_samples(tmp_path, name, kind):
    store = prepare(samples.path(name), tmp_path / "made")
    assert store.kind == kind
    verify(store)
    assert sum(store.splits.values()) == getattr(samples, name)().size


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ("Das Café öffnet früh. ".encode("latin-1") * 40, None, True),
        ("Das Café öffnet früh. ".encode("latin-1") * 40, "text", False),
        (("Das Café öffnet früh.\n" * 400).encode("utf-16"), None, True),
        ("Das Café öffnet früh. ".encode() * 40, None, False),
        (bytes(range(256)) * 4, None, False),
        (b"\xff\xfe" + np.random.default_rng(0).bytes(4000), None, False),
        (b"\0some letters" * 40, None, False),
        (b"", "bytes", False),
    ],
)
def test_text_in_another_encoding_is_named(content, kind, said, tmp_path, capsys):
    (tmp_path / "book").write_bytes(content + b"end. " * 100)
    prepare(tmp_path / "book", tmp_path / "store", kind)
    assert ("book: no UTF-8, so it is read as bytes; " in capsys.readouterr().err.replace("\n", " ")) == said


def test_a_kind_can_be_given(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    assert prepare(tmp_path / "a.txt", tmp_path / "made", "bytes").kind == "bytes"
    with pytest.raises(ValueError, match=f"a.txt: kind must be one of {', '.join(kinds.KINDS)}, got 'prose'"):
        prepare(tmp_path / "a.txt", tmp_path / "other", "prose")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("nowhere", lambda p: None, r"nowhere does not exist; give a file or a folder"),
        ("empty", lambda p: p.touch(), r"empty is empty"),
        ("empty.txt.gz", lambda p: a_file(p, gzip.compress(b"")), r"empty.txt.gz is empty"),
        ("folder", lambda p: p.mkdir(), r"folder holds no files; looked for images \(.png.*sound \(.wav.* and text"),
        (
            "folder",
            lambda p: a_file(p / "a.dat", NOISE),
            r"folder holds nothing known \(a.dat\); looked for .* say which kind",
        ),
        (
            "folder",
            lambda p: (a_file(p / "a.txt", TEXT), a_file(p / "b/c.txt", TEXT), a_file(p / "d.pdf", NOISE)),
            r"folder holds 2 files of text, and others: d.pdf; move the others away, or, if all of it is data",
        ),
        ("folder", lambda p: (a_picture(p / "a.png"), a_sound(p / "b.wav")), r"holds images \(a.png\) and sound \(b.wav\)"),
        ("folder", lambda p: (a_file(p / "a.png", TEXT), a_picture(p / "b.png")), r"folder/a.png cannot be read as PNG"),
        ("a.gz", lambda p: a_file(p, gzip.compress(NOISE)), r"a.gz holds compressed data that is no text; unpack it first"),
        ("a.zip", lambda p: a_zip(p, NOISE), r"a.zip holds compressed data that is no text"),
        ("a.tar.gz", lambda p: write_tar(p, {"a": NOISE}), r"a.tar.gz holds no CIFAR-10"),
        ("a", lambda p: a_file(p, b"\x89PNG\r\n\x1a\n"), r"a holds an image or an array; give it the ending .png"),
        ("a", lambda p: a_file(p, b"RIFF\0\0\0\0WAVE"), r"a holds sound; give it the ending .wav"),
        ("a.png", lambda p: a_file(p, TEXT), r"a.png cannot be read as PNG or JPEG"),
        ("a.png", a_picture, r"a.png holds 1 images; at least 3 are needed"),
        ("pipe", os.mkfifo, r"pipe is no file and no folder"),
    ],
)
def test_bad_sources_are_named(tmp_path, name, make, message):
    make(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / name, tmp_path / "made")
    with pytest.raises(ValueError, match=message):
        open_data(tmp_path / name, tmp_path / "cache")
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "cache"] == before


@pytest.mark.parametrize("missing", ["b.txt", None], ids=["with a name", "without a name"])
def test_errors_of_the_system_name_the_source_and_the_file(tmp_path, monkeypatch, missing):
    """As for files of /proc, some of which vanish or cannot be read."""
    folder = write_files(tmp_path / "in", {"a.txt": b"text", "b.txt": b"text"})

    def read(paths, cache, progress):
        raise OSError(5, "Input/output error", None if missing is None else str(folder / missing))

    monkeypatch.setattr(module, "cached_sha256", read)
    file = f": {folder / missing}" if missing else ""
    with pytest.raises(ValueError, match=re.escape(f"{folder} cannot be read: Input/output error{file}") + "$"):
        open_data(folder, tmp_path / "cache")


def test_a_file_that_cannot_be_hashed_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    monkeypatch.setattr(hashes.hashlib, "sha256", Broken)
    with pytest.raises(OSError, match=r"Input/output error: '.*a\.txt'"):
        hashes._hash([path], progress=False)


class Broken:
    def update(self, piece):
        raise OSError(5, "Input/output error")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fdinfo"), reason="needs Linux")
def test_a_folder_whose_files_vanish_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^/proc/self cannot be read: .*: /proc/self/"):
        open_data("/proc/self", tmp_path / "cache")


def test_the_target_is_looked_at_first(tmp_path, monkeypatch):
    a_file(tmp_path / "set" / "a.txt", TEXT)
    a_file(tmp_path / "full" / "letter", b"dear")
    monkeypatch.setattr(module, "kind_class", None)
    with pytest.raises(ValueError, match=r"full is not empty and holds no prepared data"):
        prepare(tmp_path / "set", tmp_path / "full")
    with pytest.raises(ValueError, match=r"set/made lies in the source"):
        prepare(tmp_path / "set", tmp_path / "set" / "made")


def test_twice_is_once(tmp_path):
    a_file(tmp_path / "a.txt", TEXT)
    first = prepare(tmp_path / "a.txt", tmp_path / "made")
    written = (tmp_path / "made" / "train.bin").stat().st_mtime_ns
    assert prepare(tmp_path / "a.txt", tmp_path / "made") == first
    assert (tmp_path / "made" / "train.bin").stat().st_mtime_ns == written
    a_file(tmp_path / "a.txt", TEXT + b"more")
    with pytest.raises(ValueError, match="made already holds other data"):
        prepare(tmp_path / "a.txt", tmp_path / "made")


def test_a_cache_that_cannot_be_written_has_remedies(tmp_path):
    a_file(tmp_path / "book", TEXT)
    a_file(tmp_path / "cache", TEXT)
    says = r"cannot be written: .*; set LONGSTRIDE_CACHE .* longstride data prepare SOURCE STORE"
    for cache in (tmp_path / "cache", "/proc/none"):
        with pytest.raises(ValueError, match=says):
            open_data(tmp_path / "book", cache)


def test_open_data_prepares_once(tmp_path, monkeypatch):
    a_file(tmp_path / "a.txt", TEXT)
    store = open_data(tmp_path / "a.txt", tmp_path / "cache")
    assert b"".join(contents(store).values()) == TEXT
    assert store.folder.parent == tmp_path / "cache"
    assert store.folder.name.startswith("a.txt-")
    assert open_data(store.folder) == store
    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare", None)
        assert open_data(tmp_path / "a.txt", tmp_path / "cache") == store
    assert open_data(tmp_path / "a.txt", tmp_path / "cache", "bytes").kind == "bytes"
    a_file(tmp_path / "a.txt", TEXT + b"more")
    assert sum(open_data(tmp_path / "a.txt", tmp_path / "cache").splits.values()) == len(TEXT) + 4
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_folder_s_files_are_watched(tmp_path):
    a_file(tmp_path / "set" / "a.txt", TEXT)
    first = open_data(tmp_path / "set", tmp_path / "cache")
    a_file(tmp_path / "set" / "b.txt", TEXT)
    assert sum(open_data(tmp_path / "set", tmp_path / "cache").splits.values()) == 2 * sum(first.splits.values())


def test_where_the_cache_is(tmp_path, monkeypatch):
    a_file(tmp_path / "a.txt", TEXT)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LONGSTRIDE_CACHE", raising=False)
    assert open_data(tmp_path / "a.txt").folder.parent == tmp_path / "home" / ".cache" / "longstride" / "data"
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "other"))
    assert open_data(tmp_path / "a.txt").folder.parent == tmp_path / "other" / "data"


def test_a_damaged_cache_is_named(tmp_path):
    a_file(tmp_path / "a.txt", TEXT)
    store = open_data(tmp_path / "a.txt", tmp_path / "cache")
    (store.folder / "valid.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"the cache is damaged, remove .*{store.folder.name}: .*valid.bin has 0 bytes"):
        open_data(tmp_path / "a.txt", tmp_path / "cache")


def test_a_bar_is_shown_on_a_terminal(tmp_path, monkeypatch, capsys):
    a_file(tmp_path / "a.txt", TEXT)
    prepare(tmp_path / "a.txt", tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare(tmp_path / "a.txt", tmp_path / "shown")
    assert "a.txt" in capsys.readouterr().err


def test_the_core_does_without_the_libraries(tmp_path):
    a_file(tmp_path / "a.txt", TEXT)
    code = (
        "import sys\n"
        "for name in ('PIL', 'soundfile', 'soxr'): sys.modules[name] = None\n"
        "from longstride.data.prepare import prepare\n"
        f"print(prepare({str(tmp_path / 'a.txt')!r}, {str(tmp_path / 'made')!r}).kind)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "text\n"


def split_folder(folder, write, stray, *splits):
    """Files 1 .. 3 for each split, and a stray one with the content 9."""
    for number, name in enumerate(splits or ("train", "valid", "test"), 1):
        write(folder / name, number)
    write(folder / stray, 9)


def text_file(path, number):
    a_file(path.with_suffix(".txt"), bytes([64 + number]) * 30)


def bytes_file(path, number):
    a_file(path.with_suffix(".dat"), bytes([128 + number]) * 30)


def sound_file(path, number):
    a_file(path.with_suffix(".u8"), bytes([number]) * 30)


def picture_folder(path, number):
    for one in "ab":
        (path / one).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(path / one / "x.png")


@pytest.mark.parametrize("way", ["prepare", "open_data"])
@pytest.mark.parametrize(
    ("kind", "write", "stray"),
    [
        ("text", text_file, "README"),
        ("text", text_file, "training-notes"),
        ("bytes", bytes_file, "README"),
        ("audio", sound_file, "intro"),
        ("images", picture_folder, "preview"),
    ],
)
def test_named_splits_win(tmp_path, capsys, way, kind, write, stray):
    split_folder(tmp_path / "set", write, stray)
    if way == "prepare":
        store = prepare(tmp_path / "set", tmp_path / "made", kind)
    else:
        store = open_data(tmp_path / "set", tmp_path / "cache", kind)
    values = {name: set(store.split(name).tolist()) for name in store.splits}
    assert [len(found) for found in values.values()] == [1, 1, 1]
    assert len(set.union(*values.values())) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "set: left out, " in error
    assert stray in error
    assert stray in store.source
    joined = prepare(tmp_path / "set", tmp_path / "joined", kind, join=True)
    assert sum(joined.splits.values()) > sum(store.splits.values())
    assert capsys.readouterr().err == ""


def test_images_without_valid_keep_their_test(tmp_path, capsys):
    split_folder(tmp_path / "set", picture_folder, "preview", "train", "test")
    store = prepare(tmp_path / "set", tmp_path / "made")
    assert {name: set(store.split(name).tolist()) for name in store.splits} == {"train": {1}, "valid": {1}, "test": {2}}
    assert "preview" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.png", "a.wav"])
def test_other_kinds_are_left_out_and_named(tmp_path, capsys, name):
    (a_picture if name == "a.png" else a_sound)(tmp_path / "set" / name)
    size = (tmp_path / "set" / name).stat().st_size
    for number in range(3):
        (tmp_path / "set" / f"{number}{name[1:]}").write_bytes((tmp_path / "set" / name).read_bytes())
    a_file(tmp_path / "set" / "notes.txt", b"x" * 4 * size)
    store = prepare(tmp_path / "set", tmp_path / "made")
    line = f"left out, {4 * size:,} of {8 * size:,} bytes: notes.txt"
    assert capsys.readouterr().err == f"{tmp_path / 'set'}: {line}\n"
    assert store.source.endswith(line)
    # One byte more, and the text is the most of it.
    a_file(tmp_path / "set" / "notes.txt", b"x" * (4 * size + 1))
    for attempt in (prepare, open_data):
        with pytest.raises(ValueError, match=rf"set would be read as {store.kind}, and most of its bytes are"):
            attempt(tmp_path / "set", tmp_path / "other")
    assert prepare(tmp_path / "set", tmp_path / "made", store.kind).sha256 == store.sha256
    as_text = prepare(tmp_path / "set", tmp_path / "text", "text")
    assert b"".join(contents(as_text).values()) == b"x" * (4 * size + 1)
    assert f"0{name[1:]}" in as_text.source


def test_what_lies_beside_cifar_is_named(tmp_path, capsys):
    write_files(tmp_path / "set", batches(some_images(10), None, python_2_batch) | {"batches.meta": b"names"})
    prepare(tmp_path / "set", tmp_path / "made")
    assert capsys.readouterr().err == ""
    a_picture(tmp_path / "set" / "more" / "a.png")
    assert "more/a.png" in prepare(tmp_path / "set", tmp_path / "again").source
    assert "more/a.png" in capsys.readouterr().err


def test_the_cache_follows_the_content(tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "SETTLED", -(10**18))
    a_file(tmp_path / "set" / "a.txt", TEXT)
    first = open_data(tmp_path / "set", tmp_path / "cache")
    put_back(tmp_path / "set" / "a.txt", TEXT[::-1])
    second = open_data(tmp_path / "set", tmp_path / "cache")
    assert b"".join(contents(second).values()) == TEXT[::-1]
    # Touched and not changed: the store from before.
    os.utime(tmp_path / "set" / "a.txt", ns=(0, 0))
    assert open_data(tmp_path / "set", tmp_path / "cache") == second != first
    (tmp_path / "set" / "a.txt").rename(tmp_path / "set" / "b.txt")
    assert open_data(tmp_path / "set", tmp_path / "cache").folder != second.folder
