import bz2
import gzip
import io
import lzma
import zipfile

import pytest

from longstride.data import text
from tests.data.small import contents, made

TEXT = "".join(f"line {number}: größer, 長い\n" for number in range(400)).encode()


def gzipped(data):
    return gzip.compress(data, mtime=0)  # Without the time: it would be in the names of the tests.


def zipped(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", data)
    return buffer.getvalue()


FORMS = {"raw": bytes, "gz": gzipped, "xz": lzma.compress, "bz2": bz2.compress, "zip": zipped}


def split(data, *sizes):
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return {name: data[end - size : end] for name, size, end in zip(("train", "valid", "test"), sizes, ends)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(tmp_path, form, monkeypatch):
    monkeypatch.setattr("longstride.data.streams.READ", 1000)
    path = tmp_path / f"some.{form}"
    path.write_bytes(FORMS[form](TEXT))
    part = len(TEXT) * 5 // 100
    store = made(text.Text.plan(path), tmp_path / "made")
    assert contents(store) == split(TEXT, len(TEXT) - 2 * part, part, part)
    assert store.kind == "text"
    assert text.Text.recognizes(path)


def test_enwik8_is_cut_at_its_millions(tmp_path, monkeypatch):
    assert text.KNOWN_SPLITS == {
        100_000_000: {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
        95_000_000: {"train": 90_000_000, "valid": 5_000_000},
    }
    # The same in hundredths of a thousandth; the shares of 95 would be others.
    monkeypatch.setattr(
        text,
        "KNOWN_SPLITS",
        {size // 10**5: {k: v // 10**5 for k, v in cut.items()} for size, cut in text.KNOWN_SPLITS.items()},
    )
    for size, sizes in ((1000, (900, 50, 50)), (950, (900, 50)), (949, (855, 47, 47)), (1001, (901, 50, 50))):
        path = tmp_path / f"{size}.txt"
        path.write_bytes(TEXT[:size])
        assert contents(made(text.Text.plan(path), tmp_path / f"made-{size}")) == split(TEXT, *sizes)


def test_a_folder_is_one_text(tmp_path):
    (tmp_path / "set" / "b").mkdir(parents=True)
    (tmp_path / "set" / "b" / "one.txt").write_bytes(TEXT[:3000])
    (tmp_path / "set" / "c.txt.gz").write_bytes(gzipped(TEXT[3000:]))
    (tmp_path / "set" / "empty.txt").touch()
    assert b"".join(contents(made(text.Text.plan(tmp_path / "set"), tmp_path / "made")).values()) == TEXT


def test_named_files_are_the_splits(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "wiki.train").write_bytes(TEXT[:500])
    (tmp_path / "set" / "wiki.valid").write_bytes(TEXT[500:700])
    store = made(text.Text.plan(tmp_path / "set"), tmp_path / "made")
    assert contents(store) == {"train": TEXT[:500], "valid": TEXT[500:700]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a.txt is empty"),
        ("a.txt", b"ab", r"a.txt holds 2 bytes; at least 3 are needed"),
        ("a.gz", gzipped(b""), r"a.gz is empty"),
        ("a.gz", gzipped(TEXT)[:-20], r"a.gz cannot be read: Compressed file ended"),
        ("a.xz", lzma.compress(TEXT)[:-20], r"a.xz cannot be read: Compressed file ended"),
        ("a.bz2", bz2.compress(TEXT)[:-20], r"a.bz2 cannot be read: Compressed file ended"),
        ("a.gz", gzipped(TEXT)[:100] + bytes(20) + gzipped(TEXT)[120:], r"a.gz cannot be read"),
        ("a.zip", zipped(TEXT)[:-20], r"a.zip cannot be read: File is not a zip file"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        made(text.Text.plan(tmp_path / name), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_zip_of_many_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(5):
            archive.writestr(f"{number}.txt", "text")
    with pytest.raises(ValueError, match=r"many.zip must hold one file, it holds 5 \('0.txt', '1.txt', '2.txt', ...\)"):
        text.Text.plan(tmp_path / "many.zip")


def test_what_text_is(tmp_path):
    path = tmp_path / "a"
    for content, is_text in ((TEXT[: TEXT.index(b"\xe9") + 1], True), (b"a\0b", False), (b"\xff\xfea", False)):
        path.write_bytes(content)
        assert text.Text.recognizes(path) is is_text


def test_back(tmp_path):
    text.Text().write_sample(TEXT, tmp_path / "back.txt")
    assert (tmp_path / "back.txt").read_bytes() == TEXT
