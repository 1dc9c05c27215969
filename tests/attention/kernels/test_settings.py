"""Which settings a kernel is launched with: a trial's, the user's, or the shipped ones, in this order."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import saved
from longstride.attention.kernels.launch import Launch, forget_plans
from longstride.attention.kernels.saved import KEYS, Key, Setting
from longstride.attention.kernels.settings import (
    LANE_MEMORY,
    Gpu,
    gpu,
    lane_setting,
    reload,
    shipped,
    tile_setting,
    trial,
)
from longstride.patterns import Column, Local, fixed, union
from tests.attention.error_rule import assert_within_the_rule

HALF, FLOAT = torch.float16, torch.float32
HOPPER = Gpu("NVIDIA H200", 227 * 2**10)
INTERPRETER = gpu(torch.device("cpu"))
DIGEST = "87360b40b56bccf0b340dfbb8a13822bba70c078a0b717115b88d328f0033457"
TILES = [key for key in KEYS.values() if not key.lane]
SMALL = {
    "8.0": Gpu("A100", 163 * 2**10),
    "8.9": Gpu("4090", 99 * 2**10),
    "12.0": Gpu("5090", 99 * 2**10),
}


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Has a file with these rows for a GPU in force."""

    def write(gpu, *rows):
        path = tmp_path / "kernels.json"
        path.write_text(json.dumps({gpu: dict(rows)}))
        monkeypatch.setenv(saved.VARIABLE, str(path))
        reload()
        return path

    yield write
    monkeypatch.undo()
    reload()


def row(name, *setting):
    return name, Setting(*setting)._asdict()


def measured(key):
    """The numbers that the measurements in docs/log.md gave."""
    if key.dtype == FLOAT:
        return Setting(32, 32, 4, 1) if key.width <= 64 else Setting(16, 16, 4, 1)
    if key.width > 64:
        return Setting(64, 64, 4, 2) if key.width == 128 else Setting(64, 32, 8, 2)
    return {
        ("forward", False): Setting(64, 64, 4, 2),
        ("forward", True): Setting(128, 64, 4, 3),
        ("dq", False): Setting(64, 64, 4, 1),
        ("dq", True): Setting(64, 64, 4, 3),
        ("dkv", False): Setting(32, 64, 4, 1),
        ("dkv", True): Setting(128, 64, 4, 2),
    }[key.kernel, key.summary]


def test_a_measured_gpu_gets_what_was_measured():
    assert [shipped(key, HOPPER) for key in TILES] == [measured(key) for key in TILES]
    assert lane_setting("lane_forward", False, 64, 64, HALF, 128, HOPPER) == Setting(128, 128, 8, 3, 1)
    assert lane_setting("lane_backward", True, 32, 64, HALF, 20, HOPPER) == Setting(32, 32, 4, 2, 2)
    assert lane_setting("lane_backward", True, 128, 128, HALF, 60, HOPPER) == Setting(64, 64, 8, 1, 2)
    assert lane_setting("lane_forward", False, 16, 16, HALF, 8, HOPPER) == Setting(32, 32, 4, 4, 3)
    assert lane_setting("lane_forward", False, 64, 128, HALF, 100, HOPPER) == Setting(128, 128, 8, 3, 1)
    for kernel, *facts in (
        ("lane_backward", False, 64, 128, HALF, 100),
        ("lane_forward", False, 64, 64, FLOAT, 32),
        ("lane_forward", False, 64, 64, HALF, 129),
    ):
        assert lane_setting(kernel, *facts, HOPPER) is None


def test_no_shipped_setting_changes_by_accident():
    """All keys, lanes of several lengths and sizes of shared memory, as a digest. If a setting is to change, note the
    measurement in docs/log.md, and the new digest here."""
    lines = []
    for memory, longest, key in product((48, 64, 99, 163, 220, 227), (1, 17, 33, 65, 129, 12_288), KEYS.values()):
        on = Gpu("any", memory * 2**10)
        if key.lane:
            facts = key.dtype, longest, on
            found = [lane_setting(key.kernel, key.accumulate, width, key.width, *facts) for width in (16, key.width)]
        else:
            found = tile_setting(key.kernel, key.summary, key.width, key.dtype, longest, on)
        lines.append(f"{key}, {memory} KiB, lanes of {longest}: {found}")
    assert len(lines) == 6 * 6 * 186
    assert sha256("\n".join(lines).encode()).hexdigest() == DIGEST


def test_a_gpu_with_less_memory_gets_smaller_tiles_where_it_must():
    changed = {key for key in TILES if shipped(key, SMALL["8.9"]) != measured(key)}
    wide = {key for key in TILES if key.width == 256 and key.dtype != FLOAT and key.kernel != "forward"}
    assert changed == wide  # With the measured tiles these take 100 KiB, as the test below finds.
    assert {shipped(key, SMALL["8.9"]) for key in wide} == {Setting(32, 32, 8, 2)}
    assert [shipped(key, SMALL["8.0"]) for key in TILES] == [measured(key) for key in TILES]
    assert lane_setting("lane_forward", False, 32, 32, HALF, 32, SMALL["8.0"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_shipped_tiles_fit_into_shared_memory(name):
    """As Triton's compiler says, which needs no GPU; but a process in which it does not interpret."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("ahead_of_time.py")
    found = SMALL[name]
    chosen = {key: shipped(key, found) for key in TILES if key.width >= 64 and key.dtype == torch.bfloat16}
    rows = [[key.kernel, key.summary, key.width, str(key.dtype)[6:], *tile[:4]] for key, tile in chosen.items()]
    done = subprocess.run(
        [sys.executable, script, name.replace(".", ""), json.dumps(rows)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert len(memory) == len(rows)
    for row, takes in zip(rows, memory):
        assert 0 < takes <= found.shared_memory, f"{row} takes {takes / 1024} KiB"


def key_of(kernel, summary, width, dtype):
    return Key(kernel, width, dtype, summary)


def test_the_users_settings_come_before_the_shipped_ones(use):
    use("NVIDIA H200", row("dq summary d64 float16", 32, 128, 8, 2))
    assert tile_setting("dq", True, 64, HALF, 10_000, HOPPER) == Setting(32, 128, 8, 2)
    for other in (("dq", False, 64, HALF), ("forward", True, 64, HALF), ("dq", True, 32, HALF), ("dq", True, 64, FLOAT)):
        assert tile_setting(*other, 10_000, HOPPER) == measured(key_of(*other))
    assert tile_setting("dq", True, 64, HALF, 10_000, HOPPER._replace(name="NVIDIA H100")) == Setting(64, 64, 4, 3)


def test_the_users_settings_for_whole_lanes(use):
    use("4090", row("lane_forward 64 d64 float16", 64, 64, 8, 2, 4))
    small = SMALL["8.9"]
    assert lane_setting("lane_forward", False, 32, 64, HALF, 50, small) == Setting(64, 64, 8, 2, 4)
    assert lane_setting("lane_forward", True, 32, 64, HALF, 50, small) is None
    assert lane_setting("lane_backward", False, 32, 64, HALF, 50, small) is None
    assert lane_setting("lane_forward", False, 32, 64, HALF, 20, small) is None


def test_a_lane_shorter_than_a_tile_cuts_it_also_for_the_user(use):
    use("NVIDIA H200", row("dkv d64 float16", 128, 128, 4, 1))
    assert tile_setting("dkv", False, 64, HALF, 30, HOPPER) == Setting(32, 32, 4, 1)


def test_a_trial_comes_first_and_knows_nothing_of_the_user(use):
    use("NVIDIA H200", row("dq summary d64 float16", 32, 128, 4, 1), row("dq d64 float16", 32, 128, 4, 1))
    facts = "dq", True, 64, HALF
    key = key_of(*facts)
    with trial({key: Setting(16, 16, 4, 1)}) as used:
        assert not used
        assert tile_setting(*facts, 10_000, HOPPER) == Setting(16, 16, 4, 1)
        assert used == {key}
        assert tile_setting("dq", False, 64, HALF, 10_000, HOPPER) == Setting(64, 64, 4, 1)
        lanes = KEYS["lane_forward 32 d32 float16"]
        assert shipped(lanes, HOPPER) is not None
        with trial({lanes: None}):
            assert lane_setting("lane_forward", False, 32, 32, HALF, 32, HOPPER) is None
            assert tile_setting(*facts, 10_000, HOPPER) == measured(key)
        assert tile_setting(*facts, 10_000, HOPPER) == Setting(16, 16, 4, 1)
    assert tile_setting(*facts, 10_000, HOPPER) == Setting(32, 128, 4, 1)


@pytest.fixture
def launched(monkeypatch):
    """What the kernels were launched with: (name, rows, columns or lanes of a tile, warps, stages)."""
    runs = []
    run = Launch.through_triton

    def record(self, tensors):
        if "TILES" in self.constants:
            name, tiles = self.kernel.__name__, self.constants["TILES"]
            others = tiles.together if name.startswith("lane_") else tiles.columns
            runs.append((name, tiles.rows.value, others.value, self.constants["num_warps"], self.constants["num_stages"]))
        return run(self, tensors)

    monkeypatch.setattr(Launch, "through_triton", record)
    forget_plans()
    yield runs
    forget_plans()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_saved_file_is_what_the_operator_launches(use, launched):
    use(
        INTERPRETER.name,
        row("forward summary d16 float32", 32, 16, 8, 2),
        row("dq summary d16 float32", 16, 64, 2, 3),
        row("dkv d16 float32", 64, 16, 2, 4),
        row("dkv summary d16 float32", 16, 16, 1, 5),
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
    forward, backward = (KEYS[f"lane_{way} 32 d16 float16"] for way in ("forward", "backward"))
    data = [torch.randn(1, 1, 60, 16).to(HALF) for _ in range(4)]
    with trial({forward: Setting(32, 32, 2, 1, 5), backward: None}) as used:
        assert_within_the_rule("triton", *data, Column(2))
    assert used >= {forward, backward}
    assert [run[0] for run in launched] == ["lane_forward", "backward_dq", "backward_dkv"]
    assert launched[0] == ("lane_forward", 32, 1, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_a_bad_file_is_said_in_the_first_call(use):
    path = use(INTERPRETER.name, row("forward summary d16 float32", 32, 17, 4, 1))
    with pytest.raises(
        ValueError, match="forward summary d16 float32: columns must be one of 16, 32, 64, 128, 256, got 17"
    ) as error:
        attend(*torch.randn(3, 1, 1, 9, 4).unbind(), Local(3), impl="triton")
    assert str(path) in str(error.value)


def test_lanes_count_on_more_memory_than_small_gpus_have():
    assert max(gpu.shared_memory for gpu in SMALL.values()) < LANE_MEMORY <= HOPPER.shared_memory
