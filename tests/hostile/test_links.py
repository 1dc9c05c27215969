"""Links in a folder of data, which must not make a file of the reader's own data unnoticed, and links instead of a run."""

import pytest

from longstride.data.prepare import prepare
from longstride.training import train
from tests.training.small import config


def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("mine " * 40)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/b.txt").write_text("more " * 40)
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("text " * 40)
    return source


def test_links_that_lead_out_of_a_folder_are_named(tmp_path, capsys):
    source = folder(tmp_path)
    (source / "c.txt").symlink_to("../secret.txt")
    (source / "d.txt").symlink_to("a.txt")
    (source / "e.txt").symlink_to("nowhere")
    store = prepare(source, tmp_path / "out")
    line = f"{source}: read through links that lead out of it, 1 of 3 files: c.txt, to {tmp_path.resolve()}/secret.txt\n"
    assert capsys.readouterr().err == line
    assert sum(store.splits.values()) == 600
    assert "secret" not in store.source


def test_linked_folders_are_named_and_not_followed(tmp_path, capsys):
    source = folder(tmp_path)
    (source / "more").symlink_to("../elsewhere")
    (source / "loop").symlink_to(".")
    assert sum(prepare(source, tmp_path / "out").splits.values()) == 200
    assert capsys.readouterr().err == f"{source}: links to folders are not followed: loop, more\n"


def test_no_links_no_lines(tmp_path, capsys):
    prepare(folder(tmp_path), tmp_path / "out")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("target", ["run", "nowhere"])
@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_run_that_is_a_link_to_nothing(target, resume, tmp_path):
    (tmp_path / "run").symlink_to(target)
    with pytest.raises(ValueError, match=r"^train: .*run is a link that leads nowhere; give the folder of a run$"):
        train(config(tmp_path), resume)
    assert not (tmp_path / "nowhere").exists()
