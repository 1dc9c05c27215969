"""Files from others that are broken, that lie, or that unpack to far more than they are."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import random
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
import soundfile
from PIL import Image

from longstride.data import arrays, audio, cifar, image_files, limits, streams, text
from longstride.data.images import Images
from longstride.data.limits import Limit, disk_bytes
from longstride.data.plan import Plan
from longstride.data.prepare import open_data, prepare
from longstride.data.streams import Reader
from tests.data.small import batches, contents, python_2_batch, python_3_batch, some_images, write_tar

MEGABYTE = 1 << 20


@pytest.fixture
def small_limit(monkeypatch):
    """One megabyte, so that a bomb need not be large to be one."""
    monkeypatch.setattr(limits, "LEAST", MEGABYTE)
    monkeypatch.setattr(limits, "HELD", MEGABYTE)
    monkeypatch.setattr(limits, "RATIO", 2)


@pytest.fixture
def little_memory():
    """Fails with MemoryError whatever takes more than 1.5 GB besides what is there."""
    with open("/proc/self/statm") as file:
        there = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (there + 1536 * MEGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(tmp_path, name, message, kind=None):
    """Both ways in refuse the file in one line, and leave nothing behind."""
    line = rf"(?s)^{re.escape(str(tmp_path))}.*{message}"
    for attempt, out in ((prepare, tmp_path / "made" / "store"), (open_data, tmp_path / "cache")):
        with pytest.raises(ValueError, match=line) as caught:
            attempt(tmp_path / name, out, kind)
        assert "\n" not in str(caught.value)
        assert not out.exists() or not list(out.iterdir())


# Files that unpack to far more than they are.


def zipped(name, data, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def npy(data, shape, descr="'|u1'", fortran="False"):
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def tarred(*members):
    """Headers by hand: (name, size that it says, content, type)."""
    packed = b""
    for name, size, content, kind in members:
        header = tarfile.TarInfo(name)
        header.size, header.type = size, kind
        packed += header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    return packed + bytes(1024)


BOMBS = {
    "a.gz": lambda zeros: gzip.compress(zeros),
    "a.xz": lambda zeros: lzma.compress(zeros, preset=0),
    "a.bz2": lambda zeros: bz2.compress(zeros),
    "a.zip": lambda zeros: zipped("a", zeros),
    "a.npz": lambda zeros: zipped("a.npy", npy(zeros, f"({len(zeros) >> 12}, 64, 64)")),
    "a.npy.xz": lambda zeros: lzma.compress(npy(zeros, f"({len(zeros) >> 12}, 64, 64)"), preset=0),
    "a.u8.gz": lambda zeros: gzip.compress(zeros),
    "a.tar.gz": lambda zeros: gzip.compress(tarred(("other", len(zeros), zeros, b"0"))),
    "b.tar.gz": lambda zeros: gzip.compress(tarred(("data_batch_1", len(zeros), zeros, b"0"))),
    # The standard library reads a header of type x or L into memory.
    "c.tar.gz": lambda zeros: gzip.compress(tarred(("x", len(zeros), zeros, b"x"))),
    "d.tar.gz": lambda zeros: gzip.compress(tarred(("x", len(zeros), zeros, b"L"))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_stop_at_the_limit(tmp_path, small_limit, monkeypatch, name):
    monkeypatch.setattr(streams, "READ", 1 << 16)
    size = 8 * MEGABYTE
    (tmp_path / name).write_bytes(BOMBS[name](b"a" * size))
    kind = "text" if name in ("a.gz", "a.xz", "a.bz2", "a.zip") else None
    refused(tmp_path, name, r"--max-bytes (N|\d+)$", kind)
    limit = Limit(tmp_path / name)
    with suppress(ValueError), streams.open_reader(tmp_path / name, True, limit) as file:
        while file.read(1 << 16):
            pass
    assert limit.taken <= MEGABYTE + (1 << 16)


@pytest.mark.parametrize("name", ["a.gz", "a.zip", "a.npz", "a.npy.xz"])
def test_the_limit_can_be_raised(tmp_path, small_limit, name):
    (tmp_path / name).write_bytes(BOMBS[name](b"a" * 3 * MEGABYTE))
    with pytest.raises(ValueError, match="--max-bytes"):
        prepare(tmp_path / name, tmp_path / "made")
    store = prepare(tmp_path / name, tmp_path / "made", max_bytes=4 * MEGABYTE)
    assert sum(store.splits.values()) == 3 * MEGABYTE
    with pytest.raises(ValueError, match="prepare: max_bytes must be at least 1, got 0"):
        prepare(tmp_path / name, tmp_path / "other", max_bytes=0)


def test_many_files_have_one_limit(tmp_path, small_limit):
    (tmp_path / "set").mkdir()
    for number in range(4):
        (tmp_path / "set" / f"{number}.gz").write_bytes(gzip.compress(b"a" * (MEGABYTE // 3)))
    refused(tmp_path, "set", r"set/3.gz and the files before it unpack to more than 1,048,576 bytes; .* --max-bytes N")


def test_large_data_needs_no_flag(tmp_path, small_limit):
    (tmp_path / "a.bin").write_bytes(np.random.default_rng(0).bytes(3 * MEGABYTE))
    assert sum(prepare(tmp_path / "a.bin", tmp_path / "made").splits.values()) == 3 * MEGABYTE


@pytest.mark.parametrize("start", [b"", b"some text"])
def test_holes_do_not_count_as_size(tmp_path, small_limit, start):
    with (tmp_path / "a.dat").open("wb") as file:
        file.write(start)
        file.truncate(1 << 34)
    assert disk_bytes(tmp_path / "a.dat") <= 1 << 16
    refused(tmp_path, "a.dat", r"a.dat(:| unpacks to more than 1,048,576 bytes;) .* --max-bytes (N|17179869184)")


def test_an_xz_dictionary_is_bounded(tmp_path, little_memory):
    """Of 3 GB: the standard library's reader would take them at once."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 16}]
    packed = bytearray(lzma.compress(b"some text" * 100, lzma.FORMAT_XZ, filters=filters))
    place = packed.index(b"\x21\x01", 12) + 2
    packed[place] = 39
    length = (packed[12] + 1) * 4
    packed[12 + length - 4 : 12 + length] = struct.pack("<I", zlib.crc32(bytes(packed[12 : 12 + length - 4])))
    (tmp_path / "a.xz").write_bytes(packed)
    refused(tmp_path, "a.xz", "a.xz cannot be read: it needs more than 268,435,456 bytes of memory; unpack it first")


def test_two_xz_streams_are_one_text(tmp_path):
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"one " * 30) + bytes(8) + lzma.compress(b"two " * 30))
    assert b"".join(contents(prepare(tmp_path / "a.xz", tmp_path / "made")).values()) == b"one " * 30 + b"two " * 30


def test_zip_methods_without_a_bound_are_refused(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped("a", b"text" * 100, zipfile.ZIP_LZMA))
    refused(tmp_path, "a.zip", "a.zip is compressed with zip method 14; unpack it first")


# Pickles.

OPENING = b"\x80\x02"
PICKLES = {
    "memo": OPENING + b"}r\xff\xff\xff\x3f.",
    "text memo": b"(dp1073741824\n.",
    "tuple keys": OPENING + b")" + b"q\0h\0\x86" * 60 + b"}q\1h\0K\1s.",
    "code of tuples": OPENING + b")" + b"q\0h\0\x86" * 60 + b"cnumpy\ndtype\nh\0\x85R.",
    "encodings": OPENING + b"X\0\0\x10\0" + b"a" * MEGABYTE + b"q\0" + b"c_codecs\nencode\nh\0U\6latin1\x86R" * 3000 + b".",
    "shape": python_2_batch(some_images(2)).replace(b"M\x02\x00M\x00\x0c", b"J\xff\xff\xff\x7fM\x00\x0c"),
    "negative": python_2_batch(some_images(2)).replace(b"M\x02\x00M\x00\x0c", b"J\xff\xff\xff\xffM\x00\x0c"),
    "nothing": OPENING + b".",
    "no mark": OPENING + b"t.",
    "no memo": OPENING + b"h\5.",
    "list for a dict": OPENING + b"]K\1K\2s.",
    "odd": OPENING + b"}(K\1u.",
    "instance": b"(ios\nsystem\n.",
    "object": OPENING + b"(cnumpy\nndarray\no.",
    "new object": OPENING + b"cnumpy\nndarray\n)\x81.",
    "persistent": b"Pabc\n.",
    "extension": OPENING + b"\x82\1.",
    "class called": OPENING + b"cnumpy\nndarray\n)R.",
    "long number": b"I" + b"9" * 5000 + b"\n.",
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_run_nothing_and_take_no_memory(name, little_memory):
    with pytest.raises(ValueError, match=r"^batch (is refused|is no batch)"):
        cifar.read_python(PICKLES[name], "batch")


def test_the_instructions_of_a_pickle_are_counted():
    with pytest.raises(ValueError, match="its pickle has more than 300,000 instructions"):
        cifar.read_python(OPENING + b"]" * 300_000 + b".", "batch")
    with pytest.raises(ValueError, match="is no batch"):
        cifar.read_python(OPENING + b"]" * 299_000 + b".", "batch")


def test_a_small_cifar_archive_takes_no_memory(tmp_path, little_memory):
    files = batches(some_images(10), None, python_2_batch) | {"data_batch_1": PICKLES["memo"]}
    write_tar(tmp_path / "c.tar.gz", files)
    refused(tmp_path, "c.tar.gz", "c.tar.gz/data_batch_1 is (refused|no batch)")


@pytest.mark.parametrize("protocol", range(5))
def test_batches_of_every_protocol_are_read(protocol):
    planes = some_images(3).transpose(0, 3, 1, 2).reshape(3, -1)
    batch = pickle.dumps({"data": planes, "labels": [1, 2, 3], "filenames": ["a", "b", "c"]}, protocol)
    assert np.array_equal(cifar.read_python(batch, "batch"), some_images(3))


# Archives.


def test_sparse_members_are_passed_over(tmp_path, little_memory):
    good = python_2_batch(some_images(2))
    members = [(f"data_batch_{number}", len(good), good, b"0") for number in range(1, 6)]
    (tmp_path / "a.tar").write_bytes(tarred(("test_batch", 512, bytes(512), b"S"), *members))
    assert list(cifar.from_tar(tmp_path / "a.tar")) == ["train"]
    (tmp_path / "b.tar").write_bytes(tarred(("data_batch_1", 8**11 - 1, b"", b"0")))
    refused(tmp_path, "b.tar", r"b.tar: what it holds, up to data_batch_1, would take 8,589,934,591 bytes of memory")
    (tmp_path / "c.tar").write_bytes(tarred(*members, members[0]))
    refused(tmp_path, "c.tar", "c.tar holds data_batch_1 twice")
    (tmp_path / "d.tar").write_bytes(tarred(*members)[:-20_000])
    refused(tmp_path, "d.tar", "it was cut short")


NPZ = {
    "text": (zipped("notes.txt", b"text"), "it holds 'notes.txt', which is no .npy file"),
    "no array": (zipped("a.npy", b"text"), "it does not begin as one"),
    "short": (zipped("a.npy", npy(bytes(10), "(2**3, 4, 4)")), "its header is no descr, fortran_order and shape"),
    "lies": (zipped("a.npy", npy(bytes(10), "(3, 4, 4)")), "ends 38 bytes too early"),
    "lies largely": (zipped("a.npy", npy(bytes(10), f"({10**17}, 4, 4)")), "an array of .* would take .* bytes"),
    "long": (zipped("a.npy", npy(bytes(50), "(3, 4, 4)")), "is longer than its header says"),
    "method": (zipped("a.npy", npy(bytes(48), "(3, 4, 4)"), zipfile.ZIP_LZMA), "zip method 14"),
    "line": (zipped("a\nb.txt", b"text"), r"it holds 'a\\nb.txt'"),
    "broken": (b"PK\3\4" + bytes(100), "File is not a zip file"),
}


@pytest.mark.parametrize("name", NPZ)
def test_bad_npz_files_are_refused(tmp_path, name, little_memory):
    content, message = NPZ[name]
    (tmp_path / "a.npz").write_bytes(content)
    refused(tmp_path, "a.npz", message)


def nested(depth):
    return "(" * depth + ")" * depth


NPY = [
    npy(bytes(48), "(-3, 4, 4)"),
    npy(bytes(48), "(3, -4, -4)"),
    npy(bytes(48), f"({2**62}, 4, 4)"),
    npy(bytes(48), f"({10**30}, 4, 4)"),
    npy(bytes(48), "(3, 4, 4, 5.0)"),
    npy(bytes(48), "(True, 4, 4)"),
    npy(bytes(48), nested(5000)),
    npy(bytes(48), "(3, 4, 4)", "'|O'"),
    npy(bytes(48), "(3, 4, 4)", "[('a', '|u1')]"),
    npy(bytes(48), "(3, 4, 4)", "'u1,u1'"),
    npy(bytes(48), "(3, 4, 4)", "'|V99999'"),
    npy(bytes(48), "(3, 4, 4)", "'zz'"),
    npy(bytes(48), "(3, 4, 4)", fortran="1"),
    npy(bytes(48), "(3, 4, 4), 'shape': (3, 4, 4)"),
    npy(bytes(48), "(3, 4, 4), 'more': 1"),
    npy(bytes(48), ", ".join(["(1"] + ["1"] * 40) + ")"),
    npy(bytes(47), "(3, 4, 4)"),
    npy(bytes(48), "(3, 4, 4)").replace(b"\x01\x00", b"\x09\x00", 1),
    npy(bytes(48), "(3, 4, 4)").replace(b"\x01\x00", b"\x02\x00", 1),
    npy(bytes(48), "(3, 4, 4)")[:9],
    npy(bytes(48), "(3, 4, 4)")[:20],
    b"\x93NUMPY",
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
]


@pytest.mark.parametrize("number", range(len(NPY)))
def test_bad_npy_files_are_refused(tmp_path, number, little_memory):
    (tmp_path / "a.npy").write_bytes(NPY[number])
    refused(tmp_path, "a.npy", "")


@pytest.mark.parametrize("array", [np.arange(96).reshape(6, 4, 4), np.arange(288).reshape(6, 4, 4, 3), np.zeros((3, 1, 1))])
@pytest.mark.parametrize("order", "CF")
def test_good_npy_files_are_as_numpy_reads_them(tmp_path, array, order):
    array = np.asarray(array.astype(np.uint8), order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", array)
    assert np.array_equal(arrays.open_npy(tmp_path / "a.npy"), array)
    [(name, found)] = arrays.open_npz(tmp_path / "a.npz")
    assert name == "arr_0"
    assert np.array_equal(found, array)


@pytest.mark.parametrize(
    "text",
    [
        "{'shape': (3, 4, 4), 'fortran_order': False, 'descr': '|u1'}",
        "{'descr':'|u1','shape':(3L,4,4,),'fortran_order':False}",
    ],
)
def test_headers_of_other_programs(text):
    data = b"\x93NUMPY\x03\x00" + struct.pack("<I", len(text)) + text.encode()
    assert arrays.read_header(Reader("a", io.BytesIO(data))).shape == (3, 4, 4)


def test_very_many_images_are_refused(tmp_path, small_limit):
    (tmp_path / "a.npy").write_bytes(npy(bytes(MEGABYTE), f"({MEGABYTE}, 1, 1)"))
    refused(tmp_path, "a.npy", r"1,048,576 images of 1 x 1 x 1 would take 33,554,432 bytes; .* --max-bytes 33554432")


# Sound.


def wav(rate, channels, data, kind=1, bits=16):
    block = channels * bits // 8
    form = struct.pack("<IHHIIHH", 16, kind, channels, rate, rate * block & 0xFFFFFFFF, block, bits)
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("rate", [1, 2, 999, 768_001, 2**31 - 1])
def test_rates_out_of_range_are_refused(tmp_path, rate, little_memory):
    (tmp_path / "a.wav").write_bytes(wav(rate, 1, bytes(400_000)))
    refused(tmp_path, "a.wav", rf"a.wav has a rate of {rate:,} Hz; 1,000 to 768,000 Hz can be read")


@pytest.mark.parametrize("rate", [1_000, 1_009, 11_999, 767_999, 768_000])
def test_rates_in_range_are_read(tmp_path, rate, little_memory):
    (tmp_path / "a.wav").write_bytes(wav(rate, 1, np.zeros(20_000, "<i2").tobytes()))
    assert abs(sum(map(len, audio.read(tmp_path / "a.wav"))) - 20_000 * 12_000 / rate) <= 1


def test_channels_are_bounded(tmp_path, little_memory):
    (tmp_path / "a.wav").write_bytes(wav(12_000, 64, bytes(128_000)))
    assert sum(map(len, audio.read(tmp_path / "a.wav"))) == 1_000
    (tmp_path / "a.wav").write_bytes(wav(12_000, 65, bytes(130_000)))
    refused(tmp_path, "a.wav", "a.wav has 65 channels; up to 64 can be read")


def test_a_sound_is_not_as_long_as_its_header_says(tmp_path, little_memory):
    soundfile.write(tmp_path / "a.mp3", np.sin(np.arange(3600) / 5), 24_000)
    data = bytearray((tmp_path / "a.mp3").read_bytes())
    place = re.search(b"Info|Xing", data).start()
    for frames, outcome in ((0xFFFFFFF0, "refused"), (10**6, "read")):
        data[place + 8 : place + 12] = struct.pack(">I", frames)
        (tmp_path / "a.mp3").write_bytes(data)
        if outcome == "refused":
            refused(tmp_path, "a.mp3", r"a.mp3: .* samples, as its header says, would take .* --max-bytes \d+")
        assert 1000 < sum(map(len, audio.read(tmp_path / "a.mp3"))) < 3000


def test_a_flac_of_unknown_length_is_refused(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.sin(np.arange(12_000) / 5), 12_000)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(data)
    refused(tmp_path, "a.flac", "a.flac does not say how many samples it has; encode it again")


def test_a_sound_that_unpacks_to_too_much(tmp_path, small_limit):
    soundfile.write(tmp_path / "a.flac", np.zeros(2 * MEGABYTE), 12_000)
    assert (tmp_path / "a.flac").stat().st_size < MEGABYTE // 4
    refused(tmp_path, "a.flac", r"a.flac: 2,097,152 samples, as its header says, would take 2,097,152 bytes; .* --max-bytes")


# Images.


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, *more):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


PICTURES = {
    "huge": (
        png(60_000, 60_000),
        r"an image of 60000 x 60000 x 3 would take 10,800,000,000 bytes .* --max-bytes",
    ),
    "large": (png(10_000, 10_000), r"an image of 10000 x 10000 x 3 would take 300,000,000 bytes of memory"),
    "largest": (png(2**31 - 1, 2**31 - 1), "would take"),
    "empty": (png(0, 0), "cannot be read"),
    "few pixels": (png(50, 50), "cannot be read to its end"),
    "cut": (png(50, 50)[:40], "cannot be read"),
    "animated": (png(50, 50, chunk(b"acTL", struct.pack(">II", 5, 0))), "is animated; save each of its images"),
    "text bomb": (png(50, 50, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))), "cannot be read"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PICTURES)
def test_bad_pictures_are_refused(tmp_path, name, little_memory):
    content, message = PICTURES[name]
    (tmp_path / "set").mkdir()
    for letter in "abc":
        (tmp_path / "set" / f"{letter}.png").write_bytes(content)
    refused(tmp_path, "set", message)


def test_a_jpeg_of_very_many_scans_is_refused(tmp_path):
    """Each has 119 bytes, and takes 0.06 s: a file of 1 MB would take minutes."""
    buffer = io.BytesIO()
    Image.new("L", (3000, 3000)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    (tmp_path / "a.jpg").write_bytes(data)
    assert image_files.from_png(tmp_path / "a.jpg")[1] == (3000, 3000, 1)
    (tmp_path / "a.jpg").write_bytes(data[:-2] + scan * 1000 + data[-2:])
    with pytest.raises(ValueError, match=r"a.jpg has about 1,00\d scans of 3000 x 3000 pixels; save it again, as PNG"):
        image_files.from_png(tmp_path / "a.jpg")


def test_the_limit_of_one_picture_can_be_raised(tmp_path, small_limit):
    (tmp_path / "set").mkdir()
    for name in "abc":
        Image.fromarray(np.zeros((700, 700, 3), np.uint8)).save(tmp_path / "set" / f"{name}.png")
    refused(tmp_path, "set", r"an image of 700 x 700 x 3 would take 1,470,000 bytes of memory; .* --max-bytes 5880000")
    assert prepare(tmp_path / "set", tmp_path / "made", max_bytes=5_880_000).splits["train"] == 1_470_000


# Valid files with bits flipped, bytes replaced or the end cut off.


FORMS = {
    "a.npy": Images.plan,
    "packed.npz": Images.plan,
    "plain.npz": Images.plan,
    "a.tar.gz": Images.plan,
    "a.tar": Images.plan,
    "a.wav": audio.Audio.plan,
    "a.png": image_files.open_images,
    "a.xz": text.Text.plan,
    "a.zip": text.Text.plan,
}


def write_valid(folder):
    """A small file of each form."""
    array = some_images(4, (4, 4, 3))
    np.save(folder / "a.npy", array)
    np.savez_compressed(folder / "packed.npz", train=array, test=array)
    np.savez(folder / "plain.npz", array)
    write_tar(folder / "a.tar.gz", batches(some_images(5), None, python_3_batch))
    (folder / "a.tar").write_bytes(gzip.decompress((folder / "a.tar.gz").read_bytes()))
    soundfile.write(folder / "a.wav", np.sin(np.arange(300) / 5), 11_025)
    Image.fromarray(array[0]).save(folder / "a.png")
    (folder / "a.xz").write_bytes(lzma.compress(b"some text" * 20))
    (folder / "a.zip").write_bytes(zipped("a", b"some text" * 20))


def mutated(data, chance):
    """With changes where a header is, more often than elsewhere."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(chance.choice((len(data), min(len(data), 512))))
        changed[place] = changed[place] ^ 1 << chance.randrange(8) if chance.random() < 0.7 else chance.randrange(256)
    return bytes(changed[: chance.randrange(len(data))] if chance.random() < 0.15 else changed)


def refusal(name, path):
    """What a reader says about a file, if it does not read all of it."""
    try:
        made = FORMS[name](path)
        if isinstance(made, Plan):
            for pieces in made.splits.values():
                list(pieces)
        else:
            made.read(np.zeros(1, np.int64))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FORMS)
def test_a_result_or_a_value_error(tmp_path, name, little_memory):
    write_valid(tmp_path)
    path, chance = tmp_path / name, random.Random(name)
    data, said = path.read_bytes(), []
    assert refusal(name, path) is None
    for _ in range(400):
        path.write_bytes(mutated(data, chance))
        said.append(refusal(name, path))
    refusals = [line for line in said if line is not None]
    assert len(refusals) > 40
    assert all(line.startswith(str(path)) and "\n" not in line for line in refusals)
