"""Sparse files: of a few kilobytes on the disk, and of hundreds of gigabytes to a reader."""

import io
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from PIL import Image

from longstride.data import limits
from longstride.data.audio import Audio
from longstride.data.image_files import open_images
from longstride.data.prepare import open_data, prepare
from longstride.data.raw_bytes import RawBytes
from longstride.data.store import open_store, write_store
from longstride.sampling.prompts import read_prompts
from longstride.sampling.request import Request

HUGE = 3073 << 27
"""Bytes, of which CIFAR-10's binary form is a multiple."""


def picture(kind):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    return file.getvalue()


def sound(kind):
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(4000) / 9) / 3, 8000, format=kind)
    return file.getvalue()


def with_hole(path, start, size):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(start)
    os.truncate(path, size)


STARTS = {
    "a.bin": b"",
    "a.jpg": picture("JPEG"),
    "a.ogg": sound("OGG"),
    "a.wav": sound("WAV"),
    "a.txt": b"some text",
    "a.gz": b"\x1f\x8b\x08\0\0\0\0\0",
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("read", [lambda path, out: prepare(path, out), lambda path, out: open_data(path, out)])
def test_files_of_holes_are_refused_before_they_are_read(name, read, tmp_path):
    with_hole(tmp_path / "in" / name, STARTS[name], HUGE)
    for source in (tmp_path / "in" / name, tmp_path / "in"):
        with pytest.raises(ValueError, match=rf"in.*: what is in its files would take {HUGE:,} bytes; .*--max-bytes {HUGE}"):
            read(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_limit_below_the_size_of_a_file_is_no_hole(tmp_path):
    """Sound has fewer bytes when it is prepared: 12,000 a second."""
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(480_000) / 9) / 3, 48_000)
    assert (tmp_path / "a.wav").stat().st_size > 900_000
    assert sum(prepare(tmp_path / "a.wav", tmp_path / "out", max_bytes=200_000).splits.values()) == 120_000


def test_a_comment_that_is_a_hole_is_refused(tmp_path):
    """Pillow would take twice its length in memory."""
    png, length = picture("PNG"), 900 << 20
    for name in ("1.png", "3.png", "4.png"):
        with_hole(tmp_path / "in" / name, png, len(png))
    with_hole(tmp_path / "in/2.png", png[:33] + struct.pack(">I", length) + b"tEXt", 33 + 12 + length)
    for read in (lambda: prepare(tmp_path / "in", tmp_path / "out"), lambda: open_images(tmp_path / "in")):
        with pytest.raises(ValueError, match=r"2\.png: its file would take .* bytes of memory; the limit is 268,435,456; "):
            read()


def test_a_store_of_holes_is_refused(tmp_path):
    """Its manifest fits: whoever made it could compute the hash of zeros, or leave that to others for hours."""
    some = np.zeros(1000, np.uint8)
    write_store(tmp_path / "data", "bytes", {"train": some, "valid": some})
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    manifest["splits"]["train"]["bytes"] = HUGE
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    os.truncate(tmp_path / "data/train.bin", HUGE)
    with pytest.raises(ValueError, match=rf"train\.bin has {HUGE:,} bytes and only [\d,]+ of them on the disk"):
        open_store(tmp_path / "data")


@pytest.mark.parametrize("blocks", [0, 1])
def test_blocks_that_are_not_counted_yet_are_no_holes(blocks, tmp_path, monkeypatch):
    """As of file systems that count them later."""
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4096)
    monkeypatch.setattr(limits, "LEAST", 1000)
    status = SimpleNamespace(st_size=1 << 20, st_blocks=blocks)
    monkeypatch.setattr(Path, "stat", lambda path: status)
    assert limits.disk_bytes(tmp_path / "a") == 1 << 20
    limits.check_holes(tmp_path / "a")


@pytest.mark.parametrize("rate", [768_001, 2**40, 2**62])
def test_a_rate_that_no_wav_file_has_is_refused(rate, tmp_path):
    some = np.zeros(1000, np.uint8)
    write_store(tmp_path / "data", "audio", {"train": some, "valid": some}, rate=768_000)
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest | {"rate": rate}))
    with pytest.raises(ValueError, match=rf"manifest\.json: rate must be at most 768,000, got {rate:,}"):
        open_store(tmp_path / "data")


def test_a_prompt_is_read_up_to_the_context(tmp_path):
    with_hole(tmp_path / "in/prompt", b"", HUGE)
    for path in (tmp_path / "in/prompt", Path("/dev/zero")):
        with pytest.raises(
            ValueError, match=r"prompt_file = '.*' has 64 bytes or more, and the context is 64; give at most 63"
        ):
            read_prompts(Request(prompt_file=path), RawBytes(), 64)


def test_seconds_of_a_prompt_that_overflow(tmp_path):
    (tmp_path / "a.wav").write_bytes(sound("WAV"))
    with pytest.raises(ValueError, match=r"seconds = 1e\+308 is .* bytes, and the context is 64; "):
        read_prompts(Request(prompt_file=tmp_path / "a.wav", seconds=1e308), Audio(rate=12_000), 64)
