import json
import os
import shutil

import pytest

from longstride.common import files
from longstride.common.files import (
    CONTAINERS,
    LEVELS,
    check_run_folder,
    file_sha256,
    open_inside,
    parse_object,
    read_json,
    read_text,
    walk,
)

NESTED = {
    "a list in a list": "[" * 100_000,
    "an object in an object": '{"a":' * 100_000,
    "whole, and deeper than the limit": '{"a":' * (LEVELS + 1) + "1" + "}" * (LEVELS + 1),
    "deeper than the limit, with nothing inside": '{"a":' * LEVELS + "[]" + "}" * LEVELS,
    "as deep as Python reads": '{"a":' + "[" * 900 + "]" * 900 + "}",
}


def test_folders_that_vanish_while_walking_are_skipped(tmp_path):
    (tmp_path / "stays").mkdir()
    (tmp_path / "goes" / "inner").mkdir(parents=True)
    (tmp_path / "becomes-a-file").mkdir()
    seen = []
    for path in walk(tmp_path):
        seen.append(path.name)
        if len(seen) == 3:  # Their insides come later.
            shutil.rmtree(tmp_path / "goes")
            (tmp_path / "becomes-a-file").rmdir()
            (tmp_path / "becomes-a-file").touch()
    assert sorted(seen) == ["becomes-a-file", "goes", "stays"]
    with pytest.raises(FileNotFoundError):
        list(walk(tmp_path / "nowhere"))


def test_files_that_a_run_removes_meanwhile_are_no_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_entries", lambda folder: iter([folder / "gone"]))
    check_run_folder("eval", tmp_path)


def test_an_object_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null, "x"], "b": {}}')
    assert read_json(path) == {"a": [1, 2.5, None, "x"], "b": {}}
    (tmp_path / "link").symlink_to(path)  # As model hubs have them.
    assert read_json(tmp_path / "link") == read_json(path)


def test_as_deep_as_the_limit():
    assert parse_object('{"a":' * (LEVELS - 1) + "[]" + "}" * (LEVELS - 1), "x")


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_nesting_has_a_limit(text):
    with pytest.raises(ValueError, match=rf"^x is not JSON as .*: more than {LEVELS} levels are nested$"):
        parse_object(text, "x")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite(number):
    with pytest.raises(ValueError, match=f"^x is not JSON: {number} is not a finite number$"):
        parse_object(f'{{"a": {number}}}', "x")
    assert parse_object(f'{{"a": {number}}}', "x", finite=False).keys() == {"a"}


@pytest.mark.parametrize("text", ["", "{", "nonsense", '{"a": ' + "9" * 5000 + "}"], ids=lambda text: text[:9])
def test_what_is_not_json(text):
    with pytest.raises(ValueError, match=r"^x is not JSON: "):
        parse_object(text, "x")


@pytest.mark.parametrize(("text", "kind"), [("[]", "a list"), ("1", "a number"), ("null", "null"), ('"a"', "text")])
def test_what_is_no_object(text, kind):
    with pytest.raises(ValueError, match=f"^x must hold a JSON object, got {kind}$"):
        parse_object(text, "x")


def test_many_small_lists_are_refused_before_they_are_made():
    with pytest.raises(ValueError, match=f"it has more than {CONTAINERS:,} lists and objects"):
        parse_object('{"a": [' + "[]," * CONTAINERS + "1]}", "x")


@pytest.mark.parametrize("before", ["", '"', "\\", '\\"'], ids=["nothing", "a quote", "a backslash", "both"])
def test_brackets_inside_strings_are_no_lists(before):
    string = before + "[" * (CONTAINERS // 2 + 1) + before
    text = json.dumps({"a": string, "b": [1], "c": string})
    assert parse_object(text, "x") == {"a": string, "b": [1], "c": string}


def test_lists_between_strings_are_counted():
    with pytest.raises(ValueError, match=f"it has more than {CONTAINERS:,} lists and objects"):
        parse_object('{"a\\\\": [' + '"\\"", [],' * CONTAINERS + "1]}", "x")


def test_the_depth_of_few_brackets_is_not_searched(monkeypatch):
    """That would take longer than to parse many numbers."""
    monkeypatch.setattr(files, "_is_shallow", None)
    assert parse_object('{"a": [1, 2, 3]}', "x") == {"a": [1, 2, 3]}


def test_large_files_are_not_read(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # Of which the disk has nothing.
    with pytest.raises(ValueError, match=r"a.json has 1,099,511,627,776 bytes; at most 16,777,216 are read"):
        read_json(path)
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(ValueError, match=r"a.json has 5 bytes; at most 4 are read"):
        read_text(path, 4)


def test_what_is_no_text(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"a.json is no UTF-8 text: invalid start byte at byte 7"):
        read_json(tmp_path / "a.json")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"{path} is {kind}, and no regular file"):
            read_text(path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")


def test_a_file_inside_is_made_and_opened_again(tmp_path):
    for _ in range(2):
        handle = open_inside(tmp_path / "a", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, b"x")
        os.close(handle)
    assert (tmp_path / "a").read_text() == "xx"


@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing"])
def test_a_link_to_a_file_outside_is_not_followed(there, tmp_path):
    if there:
        (tmp_path / "outside").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"/a is a link; a run holds only files and folders of its own"):
        open_inside(tmp_path / "a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert (tmp_path / "outside").exists() == there
    assert not there or (tmp_path / "outside").read_text() == "mine"


def test_a_hard_link_is_refused(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "a").hardlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"/a is a hard link, and has another name elsewhere"):
        open_inside(tmp_path / "a", os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("name", ["a", "checkpoints", "checkpoints/step-1", "checkpoints/step-1/state/x", "tensorboard/x"])
def test_a_folder_with_links_is_refused(name, tmp_path):
    folder = tmp_path / "run"
    check_run_folder("train", folder)  # Not there yet.
    (folder / name).parent.mkdir(parents=True)
    check_run_folder("train", folder)
    (tmp_path / "outside").mkdir()
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"^train: {folder / name} is a link; .* so remove it"):
        check_run_folder("train", folder)


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "scratch/checkpoints").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    check_run_folder("train", tmp_path / "run")


def test_folders_of_others_may_have_links(tmp_path):
    """A run neither reads nor writes them."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/latest").symlink_to(tmp_path)
    check_run_folder("train", tmp_path)


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
