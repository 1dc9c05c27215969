import gzip

import numpy as np
import pytest

from longstride.data.raw_bytes import RawBytes
from tests.data.small import contents, made


def test_bytes_are_taken_as_they_are(tmp_path):
    packed = gzip.compress(np.random.default_rng(0).bytes(1000))
    (tmp_path / "any.gz").write_bytes(packed)
    store = made(RawBytes.plan(tmp_path / "any.gz"), tmp_path / "made")
    part = len(packed) * 5 // 100
    assert store.kind == "bytes"
    assert list(store.splits.values()) == [len(packed) - 2 * part, part, part]
    assert b"".join(contents(store).values()) == packed


def test_a_folder(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match="set holds no files"):
        RawBytes.plan(tmp_path / "set")
    (tmp_path / "set" / "b").touch()
    with pytest.raises(ValueError, match="set: all its files are empty"):
        RawBytes.plan(tmp_path / "set")
    (tmp_path / "set" / "c").write_bytes(bytes(range(30, 60)))
    (tmp_path / "set" / "a").write_bytes(bytes(range(30)))
    assert b"".join(contents(made(RawBytes.plan(tmp_path / "set"), tmp_path / "made")).values()) == bytes(range(60))


def test_back(tmp_path):
    RawBytes().write_sample(bytes(range(256)), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == bytes(range(256))


def test_an_example_is_a_dump(tmp_path):
    tokens = np.frombuffer(b"\x00A\xff~" * 5, np.uint8)
    path = RawBytes().write_examples(tokens[None], tmp_path, "sample-data")
    assert path.name == "sample-data.txt"
    first, second = path.read_text().splitlines()
    assert first == "00000000  00 41 ff 7e 00 41 ff 7e 00 41 ff 7e 00 41 ff 7e  .A.~.A.~.A.~.A.~"
    assert second.split() == ["00000010", "00", "41", "ff", "7e", ".A.~"]
    assert second.index(".A.~") == first.index(".A.~")


def test_pictures_name_bytes_as_the_text_above_them_does():
    tokens = np.array([0x19, 0xFE, 0x07], np.uint8)
    kind = RawBytes()
    assert kind.spell(tokens, 0, 3, str.isprintable) == "19 fe 07 "
    assert [kind.byte_label(byte) for byte in tokens.tolist()] == ["0x19", "0xfe", "0x07"]
    assert kind.describe_place(tokens, 1, 3, str.isprintable) == "    2 back  0xfe"
