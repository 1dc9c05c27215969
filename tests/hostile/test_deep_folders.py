"""Folders inside each other without end, for which the standard library has no end of recursion either."""

import pytest

from longstride.common.files import DEEPEST, check_run_folder, walk
from longstride.data.prepare import open_data, prepare
from longstride.training.manifest import DamagedError, check_manifest, write_manifest


def deep(folder, levels):
    place = folder.joinpath(*["a"] * levels)
    place.mkdir(parents=True)
    (place / "x.txt").write_text("text " * 100)
    return folder


def test_as_deep_as_the_limit(tmp_path):
    folder = deep(tmp_path / "in", DEEPEST - 1)
    (folder / "link").symlink_to(".")
    assert sorted(path.name for path in walk(folder)) == ["a"] * (DEEPEST - 1) + ["link", "x.txt"]
    assert sum(prepare(folder, tmp_path / "out").splits.values()) == 500
    (folder / "link").unlink()
    write_manifest(folder)
    check_manifest(folder)


def test_deeper_folders_are_refused(tmp_path):
    folder = deep(tmp_path / "in", DEEPEST)
    says = rf"in has folders inside each other, more than {DEEPEST} levels deep; move its files up$"
    for read in (prepare, open_data):
        with pytest.raises(ValueError, match=says):
            read(folder, tmp_path / "out")
    (folder / "manifest.json").write_text('{\n  "files": {},\n  "version": 1\n}\n')
    with pytest.raises(DamagedError, match=says):
        check_manifest(folder)
    deep(tmp_path / "run/checkpoints/step-1", DEEPEST)
    with pytest.raises(ValueError, match=r"run/checkpoints has folders inside each other"):
        check_run_folder("train", tmp_path / "run")
