import pytest

from longstride.atomic import atomic_path, writable


def test_what_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_succeeds_replaces_it(tmp_path):
    path = tmp_path / "new" / "result.json"
    with atomic_path(path) as temporary:
        assert temporary.suffix == ".json"
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_writable_leaves_nothing_behind(tmp_path):
    path = tmp_path / "new" / "result.json"
    assert writable("test", "json", path) == path
    assert list(path.parent.iterdir()) == []


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"test: json = .* cannot be written: it is a folder; give a file in it"):
        writable("test", "json", tmp_path)
    with pytest.raises(ValueError, match=r"test: json = .* cannot be written: "):
        writable("test", "json", tmp_path / "file" / "result.json")
