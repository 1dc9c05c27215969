"""The user's file: its path, its content, and the errors for a bad one."""

import json
from pathlib import Path

import pytest
import torch

from longstride.attention.kernels import saved
from longstride.attention.kernels.saved import KEYS, Key, Setting

TILE = {"rows": 64, "columns": 32, "warps": 4, "stages": 3, "per_processor": 0}
LANE = {"rows": 128, "columns": 128, "warps": 8, "stages": 2, "per_processor": 3}
ROWS = {"dq summary d64 bfloat16": TILE, "lane_forward 128 accumulate d64 float16": LANE}
SETTINGS = {
    Key("dq", 64, torch.bfloat16, summary=True): Setting(64, 32, 4, 3),
    Key("lane_forward", 64, torch.float16, lane=128, accumulate=True): Setting(128, 128, 8, 2, 3),
}


@pytest.fixture(autouse=True)
def read_again():
    saved.in_force.cache_clear()
    yield
    saved.in_force.cache_clear()


def test_path(monkeypatch, tmp_path):
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path / "mine.json"))
    assert saved.place() == tmp_path / "mine.json"
    monkeypatch.setenv(saved.VARIABLE, "")
    assert saved.place() is None
    assert saved.in_force() == {}
    monkeypatch.delenv(saved.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert saved.place() == tmp_path / "longstride" / "kernels.json"
    assert saved.in_force() == {}
    for unusable in ("relative", ""):
        monkeypatch.setenv("XDG_CONFIG_HOME", unusable)
        assert saved.place() == Path.home() / ".config" / "longstride" / "kernels.json"


def test_every_key_has_a_name_of_its_own():
    assert len(KEYS) == 3 * 2 * 5 * 3 + 2 * 3 * 2 * 4 * 2
    assert all(KEYS[str(key)] == key for key in KEYS.values())


def test_write_then_read(tmp_path):
    path = tmp_path / "deep" / "kernels.json"
    everything = {key: Setting(*(allowed[-1] for allowed in saved.choices(key).values())) for key in KEYS.values()}
    gpus = {"NVIDIA H200": SETTINGS, 'a "quoted" name': {}, "all": everything}
    saved.write(path, gpus)
    assert saved.read(path) == gpus
    assert json.loads(path.read_text())["NVIDIA H200"] == ROWS
    saved.write(path, {})
    assert saved.read(path) == {}
    assert list(path.parent.iterdir()) == [path]


def test_it_is_read_once(monkeypatch, tmp_path):
    path = tmp_path / "kernels.json"
    saved.write(path, {"A": SETTINGS})
    monkeypatch.setenv(saved.VARIABLE, str(path))
    assert saved.in_force() == {"A": SETTINGS}
    path.write_text("no longer JSON")
    assert saved.in_force() == {"A": SETTINGS}
    saved.in_force.cache_clear()
    with pytest.raises(ValueError, match="Expecting value: line 1 column 1"):
        saved.in_force()


def test_a_named_file_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(
        ValueError, match=r"No such file .*none.json'; correct the file or LONGSTRIDE_SETTINGS, .* bench tune"
    ):
        saved.in_force()


def tile(**changes):
    return {"A": {"dq d64 float16": {**TILE, **changes}}}


OLD_ROW = {"kernel": "dq", "summary": True, "width": 64, "dtype": "bfloat16", **TILE}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([ROWS], " must hold a JSON object, got a list"),
        ({"A": [OLD_ROW]}, ": 'A' must be an object with settings by the kernel's name, got [{'kernel': 'dq'"),
        (
            {"A": {"dv d64 float16": TILE}},
            ": 'A': 'dv d64 float16' is no name of a kernel such as 'dq summary d64 bfloat16'",
        ),
        ({"A": {"lane_forward 64 d64 float32": LANE}}, "'lane_forward 64 d64 float32' is no name of a kernel"),
        ({"A": {"lane_forward 64 d256 float16": LANE}}, "'lane_forward 64 d256 float16' is no name of a kernel"),
        (
            {"A": {"dq d64 float16": 3}},
            ": 'A': dq d64 float16 must be an object with rows, columns, warps, stages, per_processor",
        ),
        (tile(wraps=4), "must be an object with rows, columns, warps, stages, per_processor, got {'rows': 64"),
        ({"A": {"dq d64 float16": {"rows": 64}}}, "got {'rows': 64}"),
        (tile(rows=48), "dq d64 float16: rows must be one of 16, 32, 64, 128, 256, got 48"),
        (tile(rows="64"), "rows must be one of 16, 32, 64, 128, 256, got '64'"),
        (tile(warps=4.0), "warps must be one of 1, 2, 4, 8, 16, got 4.0"),
        (tile(warps=True), "got True"),
        (tile(stages=7), "stages must be one of 1, 2, 3, 4, 5, 6, got 7"),
        (tile(per_processor=1), "per_processor must be one of 0, got 1"),
        ({"A": {"lane_forward 64 d64 float16": LANE}}, "rows must be one of 64, got 128"),
        ({"A": {"lane_forward 128 d64 float16": {**LANE, "per_processor": 0}}}, "per_processor must be one of 1, 2, 3"),
        ('{"A": {', " is not JSON: Expecting property name"),
        ("[" * 50_000, "more than 32 levels are nested"),
        ("", " is not JSON: Expecting value: line 1 column 1"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, content, error):
    path = tmp_path / "kernels.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        saved.read(path)
    text = str(caught.value)
    assert text.startswith(f"settings: {path}")
    assert error in text
    assert text.endswith("; correct the file or LONGSTRIDE_SETTINGS, or delete the file and run: longstride bench tune")
    assert "\n" not in text
    assert len(text) < 700


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder, and no regular file"):
        saved.read(tmp_path)
    path = tmp_path / "kernels.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"settings: .*kernels.json is no UTF-8 text"):
        saved.read(path)
