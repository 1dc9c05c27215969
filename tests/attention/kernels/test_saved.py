"""The user's file: where it is, what it may hold, and what is said of one that it may not."""

import json
from pathlib import Path

import pytest
import torch

from longstride.attention.kernels import saved
from longstride.attention.kernels.launches import LaneKey, LaneSetting, TileKey, TileSetting

TILE = {
    "kernel": "dq", "summary": True, "width": 64, "dtype": "bfloat16", "rows": 64, "columns": 32, "warps": 4, "stages": 3,
}  # fmt: skip
LANES = {
    "kernel": "lane_forward", "lane": 128, "later": False, "width": 64, "dtype": "float16", "warps": 8, "stages": 2,
    "per_processor": 3,
}  # fmt: skip
SETTINGS = {
    TileKey("dq", True, 64, torch.bfloat16): TileSetting(64, 32, 4, 3),
    LaneKey("lane_forward", 128, False, 64, torch.float16): LaneSetting(8, 2, 3),
}


@pytest.fixture(autouse=True)
def read_again():
    saved.in_force.cache_clear()
    yield
    saved.in_force.cache_clear()


def test_where_it_is(monkeypatch, tmp_path):
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


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "deep" / "kernels.json"
    gpus = {"NVIDIA H200": SETTINGS, 'a "quoted" name': {}}
    saved.write(path, gpus)
    assert saved.read(path) == gpus
    assert [json.loads(line.strip().rstrip(",")) for line in path.read_text().splitlines()[2:4]] == [TILE, LANES]
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


def test_a_named_file_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"LONGSTRIDE_SETTINGS = '.*none.json' is not there; .* longstride bench tune"):
        saved.in_force()


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([TILE], "it must be an object with a list of settings for each GPU, got a list"),
        ({"A": TILE}, "'A' must be a list of settings, got an object"),
        ({"A": [3]}, "'A'[0] must be an object, got 3"),
        ({"A": [LANES, {**TILE, "kernel": "dv"}]}, "'A'[1]: kernel = 'dv' must be one of forward, dq, dkv, lane_forward"),
        ({"A": [without(TILE, "kernel")]}, "'A'[0]: kernel = None must be"),
        ({"A": [{**TILE, "kernel": ["dq"]}]}, "kernel = ['dq'] must be"),
        ({"A": [{**TILE, "wraps": 4}]}, "'A'[0]: wraps is no field of dq, which has summary, width, dtype, rows"),
        ({"A": [{**LANES, "rows": 64}]}, "rows is no field of lane_forward"),
        ({"A": [without(TILE, "stages")]}, "stages is missing; it must be one of 1, 2, 3"),
        ({"A": [{**TILE, "rows": 48}]}, "rows = 48 must be one of 16, 32, 64, 128, 256"),
        ({"A": [{**TILE, "rows": "64"}]}, "rows = '64' must be"),
        ({"A": [{**TILE, "warps": 4.0}]}, "warps = 4.0 must be"),
        ({"A": [{**TILE, "warps": True}]}, "warps = true must be one of 1, 2, 4, 8, 16"),
        ({"A": [{**TILE, "summary": 1}]}, "summary = 1 must be one of false, true"),
        ({"A": [{**TILE, "dtype": "float64"}]}, "dtype = 'float64' must be one of 'bfloat16', 'float16', 'float32'"),
        ({"A": [{**TILE, "width": 48}]}, "width = 48 must be"),
        ({"A": [{**LANES, "dtype": "float32"}]}, "dtype = 'float32' must be one of 'bfloat16', 'float16'"),
        ({"A": [{**LANES, "width": 256}]}, "width = 256 must be one of 16, 32, 64, 128"),
        ({"A": [{**LANES, "per_processor": 0}]}, "per_processor = 0 must be"),
        ({"A": [TILE, {**TILE, "rows": 16}]}, "'A'[1] is for what an entry before it is for"),
        ('{"A": [], "A": []}', "'A' is there twice"),
        ('{"A": [', "Expecting value: line 1 column 8"),
        ("", "Expecting value: line 1 column 1"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, says):
    path = tmp_path / "kernels.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        saved.read(path)
    text = str(error.value)
    assert text.startswith(f"settings: in {str(path)!r}, ")
    assert says in text
    assert text.endswith("; correct it, or delete the file and make a new one with: longstride bench tune")
    assert "\n" not in text


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(ValueError, match="is a folder, and no regular file"):
        saved.read(tmp_path)
    path = tmp_path / "kernels.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"in '.*kernels.json', .*is no UTF-8 text"):
        saved.read(path)
