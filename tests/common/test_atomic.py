import os

import pytest

from longstride.common.atomic import atomic_path, check_output, check_writable, is_temporary


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
    assert check_writable("test", "json", path) == path
    assert list(path.parent.iterdir()) == []


def test_the_rule_for_outputs(tmp_path):
    path = tmp_path / "picture.png"
    assert check_output("plot", "out", path, may_replace=False) == path
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"^plot: .*picture\.png is there already; add --force to replace it"):
        check_output("plot", "out", path, may_replace=False)
    assert check_output("plot", "out", path, may_replace=True) == path
    with pytest.raises(ValueError, match=r"^plot: out = .* cannot be written: there is no folder .*new; make it first$"):
        check_output("plot", "out", tmp_path / "new" / "picture.png", may_replace=True)
    with pytest.raises(ValueError, match="cannot be written"):
        check_output("plot", "out", path / "picture.png", may_replace=True)
    with pytest.raises(ValueError, match="it is a folder"):
        check_output("plot", "out", tmp_path, may_replace=True)
    assert [one.name for one in tmp_path.iterdir()] == ["picture.png"]


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"test: json = .* cannot be written: it is a folder; give a file in it"):
        check_writable("test", "json", tmp_path)
    with pytest.raises(ValueError, match=r"test: json = .* cannot be written: "):
        check_writable("test", "json", tmp_path / "file" / "result.json")


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    tokens = iter(["00000000", "11111111"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(tokens))
    (tmp_path / "outside").write_text("mine")
    planted = tmp_path / f".result.{os.getpid()}-00000000.json"
    planted.symlink_to(tmp_path / "outside")
    with atomic_path(tmp_path / "result.json") as temporary:
        assert temporary.name == f".result.{os.getpid()}-11111111.json"
        temporary.write_text("new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "result.json").read_text() == "new"
    assert planted.is_symlink()


def test_a_link_with_the_final_name_is_replaced(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "result.json").symlink_to(tmp_path / "outside")
    with atomic_path(tmp_path / "result.json") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "result.json").is_symlink()


def test_files_have_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomic_path(tmp_path / "result.json"):
        pass
    assert (tmp_path / "result.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_a_killed_process_leaves_is_known(tmp_path):
    for name in ("model.safetensors", "eval-valid-step-5.json", "sample.bin", "sample.sym"):
        with atomic_path(tmp_path / name) as temporary:
            assert is_temporary(temporary.name)
        assert not is_temporary(name)
    assert is_temporary(".model.1234.safetensors")  # Of an earlier version.
    assert not is_temporary(".lock")


def test_an_error_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*/weights\.bin'$"), atomic_path(tmp_path / "weights.bin"):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match=r"No such file or directory: 'other'$"), atomic_path(tmp_path / "weights.bin"):
        raise FileNotFoundError(2, "No such file or directory", "other")
