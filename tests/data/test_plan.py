from pathlib import Path

import pytest

from longstride.data.plan import cut, ending, files_under, named_splits, optional, split_of


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(3, (1, 1, 1)), (20, (18, 1, 1)), (39, (37, 1, 1)), (1000, (900, 50, 50)), (10**9, (9 * 10**8, 5 * 10**7, 5 * 10**7))],
)
def test_cut(count, sizes):
    assert tuple(cut("x", count, "bytes").values()) == sizes


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_to_cut(count):
    with pytest.raises(ValueError, match=f"tiny.png holds {count} images; at least 3 are needed"):
        cut("tiny.png", count, "images")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("piano12k-valid.u8", "valid"),
        ("wiki.train.tokens", "train"),
        ("VAL", "valid"),
        ("x_test", "test"),
        ("latest.txt", None),
        ("trainspotting.txt", None),
        ("train-test.txt", None),
    ],
)
def test_names_of_splits(name, split):
    assert split_of(name) == split


def test_splits_by_name():
    folder = Path("set")
    paths = [folder / "train" / "a.png", folder / "valid" / "b.png", folder / "train" / "test.png"]
    assert named_splits(folder, paths) == {"train": [paths[0], paths[2]], "valid": [paths[1]]}
    assert named_splits(folder, [*paths, folder / "c.png"]) is None
    assert named_splits(folder, [folder / "train-1.wav", folder / "train-2.wav"]) is None
    both = [folder / "train.txt", folder / "test.txt"]
    assert named_splits(folder, both, valid_from_train=True) is not None
    with pytest.raises(ValueError, match="set has files named for train and test, and none for valid"):
        named_splits(folder, both)


def test_files_under(tmp_path):
    for name in ("b.txt", "a/c.TXT", "a/d.u8.xz", ".hidden/e.txt", ".f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in files_under(tmp_path)] == ["c.TXT", "d.u8.xz", "b.txt"]
    assert [path.name for path in files_under(tmp_path, (".u8",))] == ["d.u8.xz"]
    assert ending(Path("a.tar.gz")) == ".tar"


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"reading stars needs nosuchmodule: pip install 'longstride\[data\]'"):
        optional("nosuchmodule.sky", "reading stars")
