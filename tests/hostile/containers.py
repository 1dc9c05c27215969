"""What is done to files that have layers. Checksums and lengths are right again afterwards, or what reads them would stop
at the outermost layer."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from contextlib import suppress
from functools import partial
from random import Random

from tests.hostile.mutators import ENDS, Mutator, mutate_bytes, mutate_tree, set_number
from tests.hostile.worker import MARKER

NAMES = ("../canary.txt", "/canary.txt", "..\\canary.txt", "a/../../canary.txt", "", ".", "/", "a" * 60_000, "a\nb",
         "a\x00b", "\x1b[31m", "con", "train.npy", "data.bin", "\N{SNOWMAN}")  # fmt: skip
UNPACKED = 1 << 23
"""Bytes of zeros in a piece of a bomb."""
PIECES = 400
DATE = (2020, 1, 1, 0, 0, 0)


class Harm:
    """Makes the marker when it is unpickled. The current folder is the case's."""

    def __reduce__(self):
        import os

        return os.mkdir, (f"../{MARKER}",)


def mutate_zip(rng: Random, data: bytes, other: bytes, content: Mutator = mutate_bytes) -> bytes:
    """Members, their content and names, and what their headers say."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, other)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = rng.choice(list(members))
    renamed, mode, fields = {}, None, []
    match rng.choice(("content",) * 5 + ("name", "link", "many", "more", "none", "zeros", "fields", "fields", "comment")):
        case "content":
            members[name] = content(rng, members[name], rng.choice(list(members.values())))
        case "name":
            renamed = {name: rng.choice(NAMES)}
        case "link":
            members[name], mode = rng.choice((b"../canary.txt", b"/etc/passwd", name.encode())), stat.S_IFLNK | 0o777
        case "many":
            members |= {f"{number}": b"" for number in range(3000)}
        case "more":
            members[rng.choice(NAMES)] = members[name]
        case "none":
            members = {}
        case "zeros":
            members[name] = bytes(rng.choice((0, 1, 1 << 20, UNPACKED)))
        case "fields":
            # Offsets in the central record: flags, method, CRC, compressed size, size, extra length, attributes, offset.
            fields = [(rng.choice(((8, "H"), (10, "H"), (16, "I"), (20, "I"), (24, "I"), (30, "H"), (38, "I"), (42, "I"))))]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for one, inside in members.items():
            entry = zipfile.ZipInfo(renamed.get(one, one).replace("\x00", "\x01") or "x", DATE)
            entry.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
            entry.external_attr = (mode if mode is not None and one == name else 0o600) << 16
            archive.writestr(entry, inside)
        archive.comment = rng.choice((b"", b"", b"PK\x05\x06" + bytes(18), b"a" * 60_000))
    found = bytearray(file.getvalue())
    for offset, width in fields:
        record = found.find(b"PK\x01\x02")
        number = rng.choice((1, 8, 9, 14, 95, 99, *ENDS)) % 2 ** (8 * struct.calcsize(width))
        struct.pack_into("<" + width, found, record + offset, number)
        if offset <= 24 and rng.random() < 0.7:  # The local record says the same, two bytes earlier.
            struct.pack_into("<" + width, found, offset - 2, number)
    return bytes(found)


def mutate_gzip(rng: Random, data: bytes, other: bytes, content: Mutator = mutate_bytes) -> bytes:
    match rng.choice(("raw", "raw", "content", "content", "repaired", "repaired", "bomb")):
        case "content":
            return gzip.compress(content(rng, gzip.decompress(data), gzip.decompress(other)), 6, mtime=0)
        case "repaired":
            packed = mutate_bytes(rng, data[10:-8], other[10:-8])
            unpacked = b""
            with suppress(zlib.error):
                unpacked = zlib.decompressobj(-15).decompress(packed, UNPACKED)
            return data[:10] + packed + struct.pack("<II", zlib.crc32(unpacked), len(unpacked))
        case "bomb":
            return _bomb(rng, partial(gzip.compress, compresslevel=9, mtime=0), data)
    return mutate_bytes(rng, data, other)


def mutate_xz(rng: Random, data: bytes, other: bytes, content: Mutator = mutate_bytes) -> bytes:
    match rng.choice(("raw", "raw", "content", "unchecked", "unchecked", "dictionary", "bomb")):
        case "content":
            return lzma.compress(content(rng, lzma.decompress(data), lzma.decompress(other)), preset=0)
        case "unchecked":
            packed = bytearray(lzma.compress(lzma.decompress(data), check=lzma.CHECK_NONE, preset=0))
            body = mutate_bytes(rng, bytes(packed[24:]), other)
            return bytes(packed[:24]) + body
        case "dictionary":  # How much memory a reader takes: the last byte of the filter's properties, before a CRC.
            header = bytearray(data[12:20])
            header[4] = rng.choice((30, 36, 39, 40))
            return data[:12] + bytes(header) + struct.pack("<I", zlib.crc32(header)) + data[24:]
        case "bomb":
            return _bomb(rng, partial(lzma.compress, preset=0), data)
    return mutate_bytes(rng, data, other)


def mutate_bzip2(rng: Random, data: bytes, other: bytes, content: Mutator = mutate_bytes) -> bytes:
    match rng.choice(("raw", "raw", "raw", "content", "bomb")):
        case "content":
            return bz2.compress(content(rng, bz2.decompress(data), bz2.decompress(other)), 1)
        case "bomb":
            return _bomb(rng, bz2.compress, data)
    return mutate_bytes(rng, data, other)


def _bomb(rng: Random, compress, data: bytes) -> bytes:
    """Rarely, since a reader that is not careful takes seconds."""
    pieces = rng.choice((1,) * 12 + (4, 4, PIECES))
    return data * rng.randrange(2) + compress(bytes(UNPACKED)) * pieces


def mutate_png(rng: Random, data: bytes, other: bytes) -> bytes:
    """Chunks with a right CRC."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data, other)
    chunks, at = [], 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    number = rng.randrange(len(chunks))
    name, content = chunks[number]
    match rng.choice(("header", "header", "pixels", "pixels", "chunk", "remove", "twice", "swap", "text", "other", "name")):
        case "header":
            found = bytearray(chunks[0][1])
            if rng.random() < 0.6:
                struct.pack_into(">I", found, rng.choice((0, 4)), rng.choice((*ENDS, 20_000, 100_000)) % 2**32)
            else:
                found[rng.randrange(8, 13)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
            chunks[0] = (b"IHDR", bytes(found))
        case "pixels":
            pixels = zlib.decompress(b"".join(inside for kind, inside in chunks if kind == b"IDAT"))
            pixels = rng.choice((mutate_bytes(rng, pixels, pixels), bytes(UNPACKED), b""))
            chunks = [(kind, zlib.compress(pixels) if kind == b"IDAT" else inside) for kind, inside in chunks]
        case "chunk":
            chunks[number] = (name, mutate_bytes(rng, content, content))
        case "remove":
            del chunks[number]
        case "twice":
            chunks.insert(number, chunks[number])
        case "swap":
            rng.shuffle(chunks)
        case "text":
            packed = zlib.compress(bytes(UNPACKED), 9)
            some = (b"zTXt", b"a\0\0" + packed), (b"iCCP", b"a\0\0" + packed), (b"tEXt", b"a" * 100_000)
            chunks[1:1] = [rng.choice(some)] * rng.choice((1, 1, 200))
        case "other":
            kind = rng.choice((b"tRNS", b"PLTE", b"acTL", b"fcTL", b"fdAT", b"gAMA", b"cHRM", b"pHYs", b"eXIf", b"sRGB"))
            chunks.insert(1, (kind, rng.randbytes(rng.choice((0, 1, 4, 8, 26, 768)))))
        case "name":
            chunks[number] = (rng.randbytes(4), content)
    return data[:8] + b"".join(
        struct.pack(">I", len(inside)) + kind + inside + struct.pack(">I", zlib.crc32(kind + inside))
        for kind, inside in chunks
    )


def mutate_jpeg(rng: Random, data: bytes, other: bytes) -> bytes:
    """Its size, at times."""
    at = next((data.find(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data), -1)
    if at < 0 or rng.random() < 0.8:
        return mutate_bytes(rng, data, other)
    return (
        data[: at + 5] + struct.pack(">HH", rng.choice((0, 1, 16, 65_535)), rng.choice((0, 1, 16, 65_535))) + data[at + 9 :]
    )


RATES = (0, 1, 2, 7, 100, 11_999, 12_001, 44_100, 192_000, 2**31 - 1, 2**31, 2**32 - 1)


def mutate_wav(rng: Random, data: bytes, other: bytes) -> bytes:
    """Fields of the format chunk, at times; other forms of sound, which are recognized by their content, as bytes."""
    at = data.find(b"fmt ")
    if at < 0 or rng.random() < 0.5:
        return mutate_bytes(rng, data, other)
    found = bytearray(data)
    offset, width, numbers = rng.choice((
        (8, "H", (0, 1, 2, 3, 6, 7, 0x11, 0x31, 0x55, 0xFFFE, 0xFFFF)), (10, "H", (0, 1, 2, 255, 1024, 65_535)),
        (12, "I", RATES), (12, "I", RATES), (16, "I", RATES), (20, "H", (0, 1, 3, 65_535)),
        (22, "H", (0, 1, 8, 24, 32, 64, 65_535)),
    ))  # fmt: skip
    struct.pack_into("<" + width, found, at + offset, rng.choice(numbers))
    if rng.random() < 0.3:
        found += rng.randbytes(1000) * rng.choice((1, 10, 400))
    return bytes(found)


def _ogg_crc(page: bytes) -> int:
    """CRC-32 of the same polynomial as zlib's, but from the highest bit on, and without inversions."""
    flipped = bytes(REVERSED[byte] for byte in page)
    crc = zlib.crc32(flipped, 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int(f"{crc:032b}"[::-1], 2)


REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _pages(data: bytes) -> list[bytes]:
    return [b"OggS" + page for page in data.split(b"OggS")[1:]]


def _checked(page: bytes) -> bytes:
    if len(page) < 27:
        return page
    return page[:22] + struct.pack("<I", _ogg_crc(page[:22] + bytes(4) + page[26:])) + page[26:]


def timeless(data: bytes) -> bytes:
    """Sound without what differs each time that it is written: the time of a peak, and the serial number of an Ogg file."""
    if data.startswith(b"OggS"):
        return b"".join(_checked(page[:14] + b"\x01\x00\x00\x00" + page[18:]) for page in _pages(data))
    at = data.find(b"PEAK")
    return data if at < 0 else data[: at + 12] + bytes(4) + data[at + 16 :]


def mutate_ogg(rng: Random, data: bytes, other: bytes) -> bytes:
    """A page, with a right CRC."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, other)
    pages = _pages(data)
    number = rng.randrange(len(pages))
    pages[number] = _checked(mutate_bytes(rng, pages[number], other))
    return b"".join(pages)


SHAPES = (
    "()", "(0,)", "(-1,)", "(4, -8, 8, 3)", "(4611686018427387904,)", "(99999, 99999, 99999, 3)", "(1,) * 5", "(2, 3",
    "(1000000000, 8, 8, 3)", "(1.5, 8, 8)", "None", "(True, 8, 8)", "(" + "1, " * 70 + ")", "(2**62, 2**62)",
)  # fmt: skip
TYPES = (
    "'|O'", "'|V0'", "'<U2147483647'", "'|S9999999999'", "'<f8'", "'|u1'", "'>u2'", "'|b1'", "[('a', '|O')]", "[]", "None",
    "{}", "'" + "a" * 5000 + "'", "'u1,' * 9", "('|u1', (3,))", "('|u1', (99999, 99999))", "[('a', '|u1', (3,))]", "'<M8'",
)  # fmt: skip


def mutate_npy(rng: Random, data: bytes, other: bytes) -> bytes:
    """The text of the header, with its length."""
    if rng.random() < 0.3 or not data.startswith(b"\x93NUMPY"):
        return mutate_bytes(rng, data, other)
    if rng.random() < 0.1:
        import numpy as np

        file = io.BytesIO()
        np.save(file, np.array([Harm()], dtype=object), allow_pickle=True)
        return file.getvalue()
    (size,) = struct.unpack_from("<H", data, 8)
    text, rest = data[10 : 10 + size].decode("latin1"), data[10 + size :]
    match rng.choice(("shape", "shape", "type", "order", "bytes", "deep", "version", "long")):
        case "shape":
            text = re.sub(r"\([^)]*\)", lambda _: rng.choice(SHAPES), text)
        case "type":
            text = text.replace("'|u1'", rng.choice(TYPES))
        case "order":
            text = text.replace("False", rng.choice(("True", "1", "None", "[]")))
        case "bytes":
            text = mutate_bytes(rng, text.encode("latin1"), b"{}").decode("latin1")
        case "deep":
            text = rng.choice(("(" * 3000, "[" * 60_000, "-" * 60_000 + "1", "{[]}", "1" * 9000, "a" * 60_000, "\x00"))
        case "version":
            return b"\x93NUMPY" + rng.choice((b"\x02\x00", b"\x03\x00", b"\x09\x09")) + data[8:]
        case "long":
            return b"\x93NUMPY\x02\x00" + struct.pack("<I", rng.choice((2**31, 2**32 - 1, len(rest)))) + rest
    head = text.encode("latin1")[:65_535]
    return data[:8] + struct.pack("<H", len(head)) + head + rest


def _laughs() -> bytes:
    """The name of a type is a tuple of tuples, 2 ** 40 of them when it is printed."""
    doubled = b"".join(b"2\x86" for _ in range(40))
    return b"\x80\x02}(U\x04datacnumpy\ndtype\n)" + doubled + b"K\x00K\x01\x87Ru."


PICKLES = (
    b"\x80\x02}r" + struct.pack("<I", 2**30) + b".",
    b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",
    b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.",
    *(b"\x80\x05" + code + struct.pack("<Q", 2**32) + b"." for code in (b"\x8e", b"\x8d", b"\x96")),
    *(b"\x80\x05" + code + struct.pack("<Q", 2**62) + b"." for code in (b"\x8e", b"\x8d", b"\x96")),
    b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    b"\x80\x02" + b"(" * 300_000 + b"t" * 299_999 + b".",
    b"\x80\x02\x82\x01.", b"Pid\n.", b"\x80\x02NQ.", b"\x80\x02" + b"N0" * 100_000 + b".", b"I" + b"9" * 100_000 + b"\n.",
    b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01(J\xff\xff\xff\xff\x8a\x09"
    + b"\xff" * 8 + b"\x00tNNNtbu.",
    b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aU\x06latin1tR.", b"\x80\x02cbuiltins\neval\n(U\x011tR.", _laughs(),
)  # fmt: skip


def mutate_pickle(rng: Random, data: bytes, other: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.6:
        return mutate_bytes(rng, data, other)
    if kind < 0.7:
        return pickle.dumps({"data": Harm()}, protocol=2)
    if kind < 0.8:  # A number that follows an instruction which takes one.
        found = [match.end() for match in re.finditer(rb"[rjTXGJ\x8b]", data[:4000])]
        return (
            set_number(rng, data, other)
            if not found
            else data[: (at := rng.choice(found))] + b"\xff\xff\xff\x3f" + data[at + 4 :]
        )
    return rng.choice(PICKLES)


BLOCK = 512


def mutate_tar(rng: Random, data: bytes, other: bytes) -> bytes:
    """Of an archive, compressed or not: what is in it, its members' names and kinds, and headers with a right checksum."""
    packed = data.startswith(b"\x1f\x8b")
    if rng.random() < 0.15:
        return mutate_gzip(rng, data, other) if packed else mutate_bytes(rng, data, other)
    plain = gzip.decompress(data) if packed else data
    found = _header(rng, plain) if rng.random() < 0.3 else _members(rng, plain)
    return gzip.compress(found, 6, mtime=0) if packed else found


def _members(rng: Random, plain: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]
    number = rng.randrange(len(members))
    member, content = members[number]
    match rng.choice(("content", "content", "content", "name", "link", "kind", "sparse", "twice", "remove", "more", "pax")):
        case "content":
            how = mutate_bytes if member.name.endswith(".bin") else mutate_pickle
            members[number] = (member, how(rng, content, members[0][1]))
        case "name":
            member.name = rng.choice((*NAMES, "a/" * 100 + member.name))
        case "link":
            member.type, content = rng.choice((tarfile.LNKTYPE, tarfile.SYMTYPE)), b""
            member.linkname = rng.choice(("../canary.txt", "/etc/passwd", member.name, members[0][0].name))
            members[number] = (member, content)
        case "kind":
            member.type = rng.choice((tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE, b"Z"))
        case "sparse":
            member.pax_headers = {"GNU.sparse.size": str(rng.choice((2**40, 2**62, -1, 0))), "GNU.sparse.map": "0,1"}
            member.pax_headers |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"} if rng.random() < 0.3 else {}
        case "twice":
            members += [(member, content)] * rng.choice((1, 50))
        case "remove":
            del members[number]
        case "more":
            more = tarfile.TarInfo(rng.choice(NAMES).replace("\x00", "") or "x")
            more.size = len(content)
            members.append((more, content))
        case "pax":
            key = rng.choice(("size", "path", "linkpath", "mtime", "hdrcharset", "GNU.sparse.realsize", "GNU.sparse.name"))
            member.pax_headers = {key: rng.choice(("", "-1", "nan", str(2**64), "9" * 5000, "../canary.txt"))}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for one, inside in members:
            one.size = len(inside) if one.isreg() else 0
            one.name = one.name.replace("\x00", "") or "x"
            archive.addfile(one, io.BytesIO(inside))
    return file.getvalue()


def _header(rng: Random, plain: bytes) -> bytes:
    """A field of the first header: the size as digits or as a binary number, the kind, the version, or any bytes."""
    head = bytearray(plain[:BLOCK])
    match rng.choice(("size", "size", "sparse", "kind", "bytes")):
        case "size":
            sizes = (b"%011o\0" % (8**11 - 1), b"-0000000001\0", b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"0" * 12, b"a" * 12)
            head[124:136] = rng.choice(sizes)
        case "sparse":  # GNU's first form: where each part lies and how long it is, and the size of the whole.
            head[156:157] = b"S"
            head[257:265] = b"ustar  \0"
            head[386:482] = (b"%011o\0" % 0 + b"%011o\0" % 1) + bytes(72)
            head[482:483] = b"\0"
            head[483:495] = rng.choice((b"%011o\0" % (8**11 - 1), b"\x80" + bytes(4) + b"\x7f" * 7, b"%011o\0" % 8**7))
        case "kind":
            head[156:157] = rng.choice((b"0", b"7", b"L", b"K", b"x", b"g", b"S", b"M", b"V", b"\xff"))
        case "bytes":
            head[:BLOCK] = (mutate_bytes(rng, bytes(head), bytes(head)) + bytes(BLOCK))[:BLOCK]
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
    return bytes(head) + plain[BLOCK:]


def mutate_tensors(rng: Random, data: bytes, other: bytes) -> bytes:
    """The header of a safetensors file, with its length."""
    kind = rng.random()
    if kind < 0.3:
        return mutate_bytes(rng, data, other)
    if kind < 0.35:
        return pickle.dumps(Harm())
    (size,) = struct.unpack_from("<Q", data)
    header = mutate_tree(rng, json.loads(data[8 : 8 + size])).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + data[8 + size :]
