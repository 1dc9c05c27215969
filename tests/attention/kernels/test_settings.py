"""Which settings a kernel is launched with: a trial's, the user's, or the shipped ones, in this order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import saved
from longstride.attention.kernels.launch import Launch, forget_plans
from longstride.attention.kernels.launches import LaneKey, LaneSetting, TileKey, TileSetting
from longstride.attention.kernels.settings import (
    INTERPRETER,
    LANE_MEMORY,
    Gpu,
    LaneTiles,
    lane_tiles,
    reload,
    shipped,
    shipped_lanes,
    tile_setting,
    trial,
)
from longstride.patterns import Column, Local, fixed, union
from tests.attention.error_rule import assert_within_the_rule

HALF, FLOAT = torch.float16, torch.float32
HOPPER = Gpu("NVIDIA H200", (9, 0), 227 * 2**10)
KEYS = [
    TileKey(kernel, summary, width, dtype)
    for kernel in ("forward", "dq", "dkv")
    for summary in (False, True)
    for width in (16, 32, 64, 128, 256)
    for dtype in (torch.bfloat16, HALF, FLOAT)
]
SMALL = {
    "8.0": Gpu("A100", (8, 0), 163 * 2**10),
    "8.9": Gpu("4090", (8, 9), 99 * 2**10),
    "12.0": Gpu("5090", (12, 0), 99 * 2**10),
}


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Has a file with these rows for a GPU in force."""

    def write(gpu, *rows):
        path = tmp_path / "kernels.json"
        path.write_text(json.dumps({gpu: rows}))
        monkeypatch.setenv(saved.VARIABLE, str(path))
        reload()
        return path

    yield write
    monkeypatch.undo()
    reload()


def tile_row(kernel, summary, width, dtype, rows, columns, warps=4, stages=1):
    return {
        "kernel": kernel, "summary": summary, "width": width, "dtype": dtype,
        "rows": rows, "columns": columns, "warps": warps, "stages": stages,
    }  # fmt: skip


def measured(key):
    """The numbers that the measurements in docs/log.md gave."""
    if key.dtype == FLOAT:
        return TileSetting(32, 32, 4, 1) if key.width <= 64 else TileSetting(16, 16, 4, 1)
    if key.width > 64:
        return TileSetting(64, 64, 4, 2) if key.width == 128 else TileSetting(64, 32, 8, 2)
    return {
        ("forward", False): TileSetting(64, 64, 4, 2),
        ("forward", True): TileSetting(128, 64, 4, 3),
        ("dq", False): TileSetting(64, 64, 4, 1),
        ("dq", True): TileSetting(64, 64, 4, 3),
        ("dkv", False): TileSetting(32, 64, 4, 1),
        ("dkv", True): TileSetting(128, 64, 4, 2),
    }[key.kernel, key.summary]


def test_a_measured_gpu_gets_what_was_measured():
    assert [shipped(key, HOPPER) for key in KEYS] == [measured(key) for key in KEYS]
    assert lane_tiles(False, False, 64, 64, HALF, 128, HOPPER) == LaneTiles(128, 1, 8, 3, 1)
    assert lane_tiles(True, True, 32, 64, HALF, 20, HOPPER) == LaneTiles(32, 1, 4, 2, 2)
    assert lane_tiles(True, True, 128, 128, HALF, 60, HOPPER) == LaneTiles(64, 1, 8, 1, 2)
    assert lane_tiles(False, False, 16, 16, HALF, 8, HOPPER) == LaneTiles(32, 4, 4, 4, 3)
    assert lane_tiles(False, False, 64, 128, HALF, 100, HOPPER) == LaneTiles(128, 1, 8, 3, 1)
    for refused in ((True, False, 64, 128, HALF, 100), (False, False, 64, 64, FLOAT, 32), (False, False, 64, 64, HALF, 129)):
        assert lane_tiles(*refused, HOPPER) is None


def test_a_gpu_with_less_memory_gets_smaller_tiles_where_it_must():
    changed = {key for key in KEYS if shipped(key, SMALL["8.9"]) != measured(key)}
    wide = {key for key in KEYS if key.width == 256 and key.dtype != FLOAT and key.kernel != "forward"}
    assert changed == wide  # With the measured tiles these take 100 KiB, as the test below finds.
    assert {shipped(key, SMALL["8.9"]) for key in wide} == {TileSetting(32, 32, 8, 2)}
    assert [shipped(key, SMALL["8.0"]) for key in KEYS] == [measured(key) for key in KEYS]
    assert lane_tiles(False, False, 32, 32, HALF, 32, SMALL["8.0"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_shipped_tiles_fit_into_shared_memory(name):
    """As Triton's compiler says, which needs no GPU; but a process in which it does not interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("ahead_of_time.py")
    found = SMALL[name]
    chosen = {key: shipped(key, found) for key in KEYS if key.width >= 64 and key.dtype == torch.bfloat16}
    rows = [[key.kernel, key.summary, key.width, str(key.dtype)[6:], *tile] for key, tile in chosen.items()]
    done = subprocess.run(
        [sys.executable, script, name.replace(".", ""), json.dumps(rows)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert len(memory) == len(rows)
    for row, takes in zip(rows, memory):
        assert 0 < takes <= found.shared_memory, f"{row} takes {takes / 1024} KiB"


def test_the_users_settings_come_before_the_shipped_ones(use):
    use("NVIDIA H200", tile_row("dq", True, 64, "float16", 32, 128, 8, 2))
    assert tile_setting("dq", True, 64, HALF, 10_000, HOPPER) == TileSetting(32, 128, 8, 2)
    for other in (("dq", False, 64, HALF), ("forward", True, 64, HALF), ("dq", True, 32, HALF), ("dq", True, 64, FLOAT)):
        assert tile_setting(*other, 10_000, HOPPER) == measured(TileKey(*other))
    assert tile_setting("dq", True, 64, HALF, 10_000, HOPPER._replace(name="NVIDIA H100")) == TileSetting(64, 64, 4, 3)


def test_the_users_settings_for_whole_lanes(use):
    row = {"kernel": "lane_forward", "lane": 64, "later": False, "width": 64, "dtype": "float16"}
    use("4090", {**row, "warps": 8, "stages": 2, "per_processor": 4})
    small = SMALL["8.9"]
    assert lane_tiles(False, False, 32, 64, HALF, 50, small) == LaneTiles(64, 1, 8, 2, 4)
    assert lane_tiles(False, True, 32, 64, HALF, 50, small) is None
    assert lane_tiles(True, False, 32, 64, HALF, 50, small) is None
    assert lane_tiles(False, False, 32, 64, HALF, 20, small) is None


def test_a_lane_shorter_than_a_tile_cuts_it_also_for_the_user(use):
    use("NVIDIA H200", tile_row("dkv", False, 64, "float16", 128, 128))
    assert tile_setting("dkv", False, 64, HALF, 30, HOPPER) == TileSetting(32, 32, 4, 1)


def test_a_trial_comes_first_and_knows_nothing_of_the_user(use):
    use("NVIDIA H200", tile_row("dq", True, 64, "float16", 32, 128), tile_row("dq", False, 64, "float16", 32, 128))
    key = TileKey("dq", True, 64, HALF)
    with trial({key: TileSetting(16, 16, 4, 1)}) as used:
        assert not used
        assert tile_setting(*key, 10_000, HOPPER) == TileSetting(16, 16, 4, 1)
        assert used == {key}
        assert tile_setting("dq", False, 64, HALF, 10_000, HOPPER) == TileSetting(64, 64, 4, 1)
        lanes = LaneKey("lane_forward", 32, False, 32, HALF)
        assert shipped_lanes(lanes, 32, HOPPER) is not None
        with trial({lanes: None}):
            assert lane_tiles(False, False, 32, 32, HALF, 32, HOPPER) is None
            assert tile_setting(*key, 10_000, HOPPER) == measured(key)
        assert tile_setting(*key, 10_000, HOPPER) == TileSetting(16, 16, 4, 1)
    assert tile_setting(*key, 10_000, HOPPER) == TileSetting(32, 128, 4, 1)


@pytest.fixture
def launched(monkeypatch):
    """What the kernels were launched with: (name, rows, columns or lanes of a tile, warps, stages)."""
    runs = []
    run = Launch.through_triton

    def record(self, tensors):
        if "TILES" in self.constants:
            rows, others = (x.value for x in self.constants["TILES"][:2])
            runs.append((self.kernel.__name__, rows, others, self.constants["num_warps"], self.constants["num_stages"]))
        return run(self, tensors)

    monkeypatch.setattr(Launch, "through_triton", record)
    forget_plans()
    yield runs
    forget_plans()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_saved_file_is_what_the_operator_launches(use, launched):
    use(
        INTERPRETER.name,
        tile_row("forward", True, 16, "float32", 32, 16, 8, 2),
        tile_row("dq", True, 16, "float32", 16, 64, 2, 3),
        tile_row("dkv", False, 16, "float32", 64, 16, 2, 4),
        tile_row("dkv", True, 16, "float32", 16, 16, 1, 5),
    )
    data = [torch.randn(1, 1, 150, 16) for _ in range(4)]
    assert_within_the_rule("triton", *data, union(*fixed(64, 8)))
    assert launched == [
        ("forward", 32, 16, 8, 2),
        ("backward_dq", 16, 64, 2, 3),
        ("backward_dkv", 64, 16, 2, 4),
        ("backward_dkv", 16, 16, 1, 5),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_trial_reaches_whole_lanes_in_both_directions(launched):
    forward, backward = (LaneKey(f"lane_{way}", 32, False, 16, HALF) for way in ("forward", "backward"))
    data = [torch.randn(1, 1, 60, 16).to(HALF) for _ in range(4)]
    with trial({forward: LaneSetting(2, 1, 5), backward: None}) as used:
        assert_within_the_rule("triton", *data, Column(2))
    assert used >= {forward, backward}
    assert [run[0] for run in launched] == ["lane_forward", "backward_dq", "backward_dkv"]
    assert launched[0] == ("lane_forward", 32, 1, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_bad_file_is_said_in_the_first_call(use):
    path = use(INTERPRETER.name, tile_row("forward", True, 16, "float32", 32, 17))
    with pytest.raises(ValueError, match=r"\[0\]: columns = 17 must be one of 16, 32, 64") as error:
        attend(*torch.randn(3, 1, 1, 9, 4).unbind(), Local(3), impl="triton")
    assert str(path) in str(error.value)


def test_lanes_count_on_more_memory_than_small_gpus_have():
    assert max(gpu.shared_memory for gpu in SMALL.values()) < LANE_MEMORY <= HOPPER.shared_memory
