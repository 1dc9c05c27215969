"""Small data of every form, made on the spot."""

import io
import pickle
import struct
import tarfile

import numpy as np

from longstride.data.store import write_store


def made(plan, out):
    return write_store(out, plan.kind, plan.splits, plan.item, plan.rate, plan.source)


def contents(store):
    return {name: store.split(name).tobytes() for name in store.splits}


def some_images(count, item=(32, 32, 3), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *item), dtype=np.uint8)


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def python_2_batch(images):
    """The published batches, opcode by opcode: protocol 2, text and array bytes as Python 2's str."""
    data = planes(images).tobytes()

    def short(text):
        return b"U" + bytes([len(text)]) + text.encode()

    number = b"M" + struct.pack("<H", len(images))
    dtype = b"cnumpy\ndtype\n" + short("u1") + b"K\x00K\x01\x87R(K\x03" + short("|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87R"
    array += b"(K\x01" + number + b"M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    label = short("batch_label") + short("training batch 1 of 5") + short("labels") + b"](K\x06K\x09e"
    return b"\x80\x02}q\x01(" + label + short("data") + array + b"u."


def python_3_batch(images):
    return pickle.dumps({"data": planes(images), "labels": [1] * len(images)}, protocol=2)


def binary_batch(images):
    labels = np.arange(len(images), dtype=np.uint8)[:, None] % 10
    return np.concatenate([labels, planes(images)], axis=1).tobytes()


def batches(train, test, write, ending=""):
    """The files of CIFAR-10, by name."""
    parts = np.array_split(train, 5)
    files = {f"data_batch_{number}{ending}": write(part) for number, part in enumerate(parts, 1)}
    return files | ({f"test_batch{ending}": write(test)} if test is not None else {}) | {"readme.html": b"<html>"}


def write_files(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
