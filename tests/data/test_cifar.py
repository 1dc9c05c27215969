import os
import pickle

import numpy as np
import pytest

from longstride.data import cifar
from longstride.data.images import Images
from tests.data.small import (
    batches,
    binary_batch,
    contents,
    made,
    python_2_batch,
    python_3_batch,
    some_images,
    write_files,
    write_tar,
)

TRAIN, TEST = some_images(50), some_images(7, seed=1)
FORMS = {"python": (python_2_batch, ""), "again": (python_3_batch, ""), "binary": (binary_batch, ".bin")}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_bytes(tmp_path, form, monkeypatch):
    monkeypatch.setattr(cifar, "IMAGES", 50)
    monkeypatch.setattr(cifar, "HELD_OUT", 2)
    np.save(tmp_path / "train.npy", TRAIN)
    array = contents(made(Images.plan(tmp_path / "train.npy"), tmp_path / "array"))
    write, ending = FORMS[form]
    files = batches(TRAIN, TEST, write, ending)
    folder = write_files(tmp_path / "in" / f"cifar-10-batches-{ending[1:] or 'py'}", files)
    tar = write_tar(tmp_path / "cifar.tar.gz", files)
    for number, source in enumerate((folder, folder.parent, tar)):
        store = made(Images.plan(source), tmp_path / f"made-{number}")
        assert store.splits == {"train": 48 * 3072, "valid": 2 * 3072, "test": 7 * 3072}
        assert store.item == (32, 32, 3)
        assert contents(store) == array | {"test": TEST.tobytes()}
        assert "seed 0: train 48, valid 2" in store.source
    together = np.concatenate([np.frombuffer(array[name], np.uint8).reshape(-1, 32, 32, 3) for name in ("train", "valid")])
    assert sorted(image.tobytes() for image in together) == sorted(image.tobytes() for image in TRAIN)


def test_the_paper_s_split():
    assert (cifar.IMAGES, cifar.HELD_OUT) == (50_000, 2_000)


def test_without_test_images(tmp_path):
    folder = write_files(tmp_path / "in", batches(TRAIN, None, binary_batch, ".bin"))
    assert made(Images.plan(folder), tmp_path / "made").splits == {"train": 48 * 3072, "valid": 2 * 3072}


def test_one_binary_file(tmp_path):
    (tmp_path / "some.bin").write_bytes(binary_batch(TRAIN))
    assert cifar.is_binary(tmp_path / "some.bin")
    store = made(Images.plan(tmp_path / "some.bin"), tmp_path / "made")
    assert store.splits == {"train": 46 * 3072, "valid": 2 * 3072, "test": 2 * 3072}
    (tmp_path / "some.bin").write_bytes(bytes([10]) + bytes(3072))
    assert not cifar.is_binary(tmp_path / "some.bin")
    with pytest.raises(ValueError, match=r"some.bin has label 10; CIFAR-10 has labels from 0 to 9"):
        Images.plan(tmp_path / "some.bin")


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['LONGSTRIDE_TEST_EVIL']}",)


def raw(*lines):
    return b"\x80\x02" + b"".join(lines)


@pytest.mark.parametrize("protocol", range(6))
def test_an_evil_pickle_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("LONGSTRIDE_TEST_EVIL", str(tmp_path / "executed"))
    evil = pickle.dumps({"data": Evil()}, protocol)
    pickle.loads(evil)  # It does what it says ...
    assert (tmp_path / "executed").exists()
    (tmp_path / "executed").unlink()
    files = batches(TRAIN, TEST, python_2_batch) | {"data_batch_3": evil}
    folder = write_files(tmp_path / "in", files)
    with pytest.raises(ValueError, match=r"in/data_batch_3 is refused: its pickle asks for '(posix|nt).system"):
        made(Images.plan(folder), tmp_path / "made")
    with pytest.raises(ValueError, match=r"c.tar.gz/data_batch_3 is refused"):
        made(Images.plan(write_tar(tmp_path / "c.tar.gz", files)), tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.tar.gz", "in"]  # ... but not here.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is refused"),
        (b"no pickle", "is refused"),
        (python_2_batch(TRAIN)[:-100], "is refused"),
        (pickle.dumps([1, 2]), "is no batch of CIFAR-10"),
        (pickle.dumps({"labels": [1]}), "is no batch of CIFAR-10: it must hold 'data'"),
        (pickle.dumps({"data": b"text"}), "is no batch of CIFAR-10"),
        (pickle.dumps({"data": np.zeros((2, 3071), np.uint8)}, 2), r"it must hold 'data', uint8 of shape \[n, 3072\]"),
        (pickle.dumps({"data": np.zeros((2, 3072))}, 2), "it holds an array of 'f8', not of uint8"),
        (raw(b"cnumpy\nndarray\n."), "is no batch"),
        (
            raw(b"cnumpy.core.multiarray\n_reconstruct\n}(U\x08__dict__K\x01ub."),
            "it sets the state of something other",
        ),
        (raw(b"cnumpy.core.multiarray\nscalar\n."), "asks for 'numpy.core.multiarray.scalar"),
        (raw(b"c__builtin__\neval\nU\x011\x85R."), "asks for '__builtin__.eval"),
        (raw(b"ccopyreg\n_reconstructor\n."), "asks for 'copyreg._reconstructor"),
    ],
)
def test_other_pickles_are_refused(content, message):
    with pytest.raises(ValueError, match=rf"^the-file .*{message}"):
        cifar.read_python(content, "the-file")


def test_incomplete_sets_are_named(tmp_path):
    files = batches(TRAIN, TEST, binary_batch, ".bin")
    cut = files | {"data_batch_2.bin": files["data_batch_2.bin"][:-1]}
    with pytest.raises(ValueError, match=r"data_batch_2.bin has 30729 bytes, no multiple of CIFAR-10's 3073"):
        Images.plan(write_files(tmp_path / "cut", cut))
    files.pop("data_batch_4.bin")
    with pytest.raises(ValueError, match=r"fewer: data_batch_4.bin is missing; CIFAR-10 has five training batches"):
        Images.plan(write_files(tmp_path / "fewer", files))
    with pytest.raises(ValueError, match=r"other.tar.gz holds no CIFAR-10; looked for data_batch_1"):
        Images.plan(write_tar(tmp_path / "other.tar.gz", {"song.txt": b"la"}))
    whole = write_tar(tmp_path / "whole.tar.gz", files).read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half.tar.gz cannot be read"):
        Images.plan(tmp_path / "half.tar.gz")
