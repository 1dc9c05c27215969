import pytest

from longstride.atomic import atomic_path


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
