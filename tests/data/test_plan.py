from pathlib import Path

import pytest

from longstride.data.plan import data_suffix, files_under, named_splits, split_of, split_sizes


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(3, (1, 1, 1)), (20, (18, 1, 1)), (39, (37, 1, 1)), (1000, (900, 50, 50)), (10**9, (9 * 10**8, 5 * 10**7, 5 * 10**7))],
)
def test_cut(count, sizes):
    assert tuple(split_sizes("x", count, "bytes").values()) == sizes


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_to_cut(count):
    with pytest.raises(ValueError, match=f"tiny.png holds {count} images; at least 3 are needed"):
        split_sizes("tiny.png", count, "images")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("piano12k-valid.u8", "valid"),
        ("wiki.train.tokens", "train"),
        ("VAL", "valid"),
        ("x_test", "test"),
        ("TrainSet.txt", "train"),
        ("trainA", "train"),
        ("testdata", "test"),
        ("testing", "test"),
        ("dev.txt", "valid"),
        ("dataset.txt", None),
        ("Contest.txt", None),
        ("latest.txt", None),
        ("trainspotting.txt", None),
        ("train-test.txt", None),
    ],
)
def test_names_of_splits(name, split):
    assert split_of(name) == split


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("train/a.png valid/b.png train/test.png", {"train": "train/a.png train/test.png", "valid": "valid/b.png"}),
        ("train.txt valid.txt README.txt", {"train": "train.txt", "valid": "valid.txt"}),
        ("train/a val/b c.png", {"train": "train/a", "valid": "val/b"}),
        (
            "train.txt valid.txt test.txt training-notes.txt",
            {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"},
        ),
        ("train-1.txt train2.txt valid.txt", {"train": "train-1.txt train2.txt", "valid": "valid.txt"}),
        ("train-a.txt train-b.txt valid.txt", {"train": "train-a.txt train-b.txt", "valid": "valid.txt"}),
        ("wiki.train.raw wiki.valid.raw about", {"train": "wiki.train.raw", "valid": "wiki.valid.raw"}),
        ("train-test.txt train.txt valid.txt", {"train": "train.txt", "valid": "valid.txt"}),
        ("x/train.txt x/valid.txt README", {"train": "x/train.txt", "valid": "x/valid.txt"}),
        ("cats/train/1 dogs/train/1 cats/val/1", {"train": "cats/train/1 dogs/train/1", "valid": "cats/val/1"}),
        ("train.txt dev.txt testing.txt", {"train": "train.txt", "valid": "dev.txt", "test": "testing.txt"}),
        ("trainset.txt devset.txt testset.txt", {"train": "trainset.txt", "valid": "devset.txt", "test": "testset.txt"}),
        ("trainA/1 valA/1 testA/1", {"train": "trainA/1", "valid": "valA/1", "test": "testA/1"}),
        ("x/y/train-a.txt x/y/val-a.txt", {"train": "x/y/train-a.txt", "valid": "x/y/val-a.txt"}),
        ("train-1.wav train-2.wav", None),
        ("x/train/1 x/train/2", None),
        ("training-notes.txt a.txt b.txt", None),
        ("a.txt b/test/c.txt b/retrain.txt", None),
        ("a.txt README", None),
    ],
)
def test_splits_by_name(tmp_path, names, groups):
    paths = files(tmp_path, names)
    expected = groups and {split: [tmp_path / name for name in members.split()] for split, members in groups.items()}
    assert named_splits(tmp_path, paths) == expected


def files(folder, names, size=10):
    paths = [folder / name for name in names.split()]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return paths


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("train.txt test.txt", r"has files named for train \(train.txt\) and test \(test.txt\), and none for valid"),
        ("valid.txt test.txt a.txt b.txt", r"has files named for valid .* and test .*, and none for train; .* --join"),
        ("test/a.txt b.txt", r"has files named for test \(test/a.txt\), and none for train"),
        ("x/train.txt x/test.txt", r"has files named for train \(x/train.txt\) and test .*, and none for valid"),
        ("train.txt heldout.txt", r"has files named for train \(train.txt\), and none for valid"),
        ("x/train/1 x/eval/1", r"has files named for train \(x/train/1\), and none for valid; .* --join"),
        ("test/a test/b", r"has files named for test \(test/a\), and none for train"),
        ("train valid a b c", r"most of its bytes have no split in their names \(a, b, c\).* --join"),
        ("train valid a b c d e", r"\(a, b, c and 2 more\)"),
    ],
)
def test_data_named_for_a_split_is_not_joined(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        named_splits(tmp_path, files(tmp_path, names))
    if message.endswith("none for valid"):
        groups = named_splits(tmp_path, files(tmp_path, names), valid_from_train=True)
        assert list(groups or {}) == ["train", "test"][: 1 + ("test" in names)]


def test_files_under(tmp_path):
    for name in ("b.txt", "a/c.TXT", "a/d.u8.xz", ".hidden/e.txt", ".f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in files_under(tmp_path)] == ["c.TXT", "d.u8.xz", "b.txt"]
    assert [path.name for path in files_under(tmp_path, (".u8",))] == ["d.u8.xz"]
    assert data_suffix(Path("a.tar.gz")) == ".tar"
