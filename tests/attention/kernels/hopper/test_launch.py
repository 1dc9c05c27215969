"""The Hopper kernels. On a GPU they are compared with the oracle; without one they are compiled for it, as launched."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from longstride.attention.kernels.launch import forget_plans
from longstride.patterns import notation
from tests.attention.cases import tensors
from tests.attention.error_rule import assert_within_the_rule, results

HOPPER = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)
SHARED_MEMORY = 232_448
"""Bytes for the programs of a multiprocessor together, of which each takes 1,024 more than it says."""
REGISTERS = 65_536
PAST, CHUNKS, WINDOW = ["past_forward"], ["chunk_forward"], ["window_forward"]
WALK, LANES = ["walk_forward"], ["lane_forward"]
TILES_BACK = ["backward_row_stats", "hopper_dq", "hopper_dkv"]
CELLS_BACK = [*TILES_BACK, "hopper_dkv"]
OWN_BACK = ["lane_backward"] * 2 + ["hopper_dq", "hopper_dkv"]
PARTS_BACK = ["backward_sum_parts"] * 2
CASES = [  # patterns, batch, heads, n, d_qk, d_v; the kernels forward, and backward
    ("merged(fixed(128, 32))", 2, 3, 1000, 64, 64, PAST, OWN_BACK),
    ("merged(fixed(128, 8))", 1, 2, 1537, 32, 32, PAST, OWN_BACK),
    ("merged(fixed(128, 128))", 1, 2, 700, 64, 32, PAST, CELLS_BACK),
    ("merged(fixed(256, 32))", 1, 2, 1100, 48, 64, PAST, CELLS_BACK),
    ("merged(fixed(96, 16))", 2, 2, 1000, 64, 64, PAST, OWN_BACK),
    ("merged(fixed(1024, 256))", 1, 1, 3500, 64, 64, PAST, CELLS_BACK),
    ("summary(128, 16)", 1, 2, 1000, 64, 64, PAST, CELLS_BACK),
    ("merged(fixed(128, 8))", 1, 2, 6001, 64, 64, PAST, OWN_BACK + PARTS_BACK),
    ("merged(fixed(1024, 256))", 1, 1, 9000, 64, 32, PAST, CELLS_BACK + PARTS_BACK),
    ("block(128)|summary(128, 8, 0), block(128)|summary(128, 8, 1)", 1, 2, 900, 64, 64, PAST, OWN_BACK),
    ("dense()", 1, 2, 700, 64, 64, PAST, TILES_BACK),
    ("dense()", 1, 1, 130, 16, 16, PAST, TILES_BACK),
    ("block(300)", 1, 2, 2000, 64, 64, CHUNKS * 2, TILES_BACK),
    ("block(1024)", 2, 3, 4096, 64, 64, CHUNKS, TILES_BACK),
    ("block(300)", 4, 4, 3000, 32, 32, CHUNKS, TILES_BACK),
    ("local(300)", 1, 2, 1500, 64, 64, WINDOW, TILES_BACK),
    ("column(4)", 1, 2, 2048, 64, 64, CHUNKS, TILES_BACK),
    ("column(4)", 1, 2, 2056, 64, 64, CHUNKS, TILES_BACK),
    ("column(3)", 2, 2, 2501, 64, 64, CHUNKS * 2, []),
    ("column(4)", 1, 2, 2048, 48, 48, PAST, TILES_BACK),
    ("merged(fixed(98, 2))", 1, 2, 1000, 64, 64, PAST, OWN_BACK),
    ("block(302)", 1, 2, 1000, 64, 64, CHUNKS * 2, []),
    ("local(2)|column(4)", 1, 2, 2048, 48, 48, [*WINDOW, *PAST], TILES_BACK * 2),
    ("local(2)|column(4)", 1, 2, 2048, 64, 64, [*WALK, *PAST], ["walk_backward", *TILES_BACK]),
    ("local(128)", 2, 3, 1000, 64, 64, WALK, ["walk_backward"]),
    ("local(128)", 1, 2, 50, 32, 32, WALK, ["walk_backward"]),
    ("local(100)", 2, 3, 1000, 32, 32, WALK, ["walk_backward"]),
    ("local(40)", 1, 2, 130, 64, 64, WALK, ["walk_backward"]),
    ("block(128)", 2, 3, 1024, 64, 64, LANES, ["lane_backward"]),
    ("block(100)", 1, 3, 1000, 32, 32, LANES, ["lane_backward"]),
    ("block(256)", 1, 2, 2050, 32, 32, LANES * 2, ["lane_backward"] * 2),
    ("block(256)", 1, 2, 1024, 64, 64, LANES, TILES_BACK),
    ("column(10)", 2, 3, 1000, 64, 64, LANES, ["lane_backward"]),
    ("column(8)", 1, 3, 1003, 32, 32, LANES * 2, ["lane_backward"] * 2),
    ("column(9)", 1, 2, 2050, 32, 32, LANES * 2, ["lane_backward"] * 2),
    ("column(128)", 2, 2, 1000, 64, 64, [], []),
    ("merged(strided(128))", 3, 2, 1000, 64, 64, WALK, ["walk_backward"]),
    ("merged(strided(100))", 3, 2, 512, 32, 32, WALK, ["walk_backward"]),
    ("merged(strided(96))", 2, 2, 1000, 64, 128, WALK, ["walk_backward"]),
    ("local(96)", 2, 2, 3072, 64, 128, WALK, ["walk_backward"]),
    ("local(128)", 2, 3, 1000, 64, 128, WALK, ["walk_backward"]),
    ("local(40)", 1, 2, 130, 64, 128, WALK, ["walk_backward"]),
    ("column(96)", 2, 2, 3072, 64, 128, LANES, ["lane_backward"]),
    ("column(20)", 2, 3, 1003, 64, 128, LANES * 2, ["lane_backward"] * 2),
    ("block(96)", 2, 2, 3000, 64, 128, LANES * 2, ["lane_backward"] * 2),
    ("merged(strided(96))", 2, 2, 3072, 64, 128, [*WALK, *LANES], ["walk_backward", "lane_backward"]),
    ("merged(strided(16))", 1, 2, 1003, 64, 128, [*WALK, *LANES * 2], ["walk_backward", *["lane_backward"] * 2]),
    ("merged(strided(16))", 2, 2, 1003, 32, 32, [*LANES * 2, *WALK], ["walk_backward", *["lane_backward"] * 2]),
    ("merged(strided(10))", 1, 2, 1000, 64, 64, [*LANES, *WALK], ["walk_backward", "lane_backward"]),
    ("merged(strided(32))", 2, 2, 3072, 64, 128, [*WALK, *LANES], ["walk_backward", "lane_backward"]),
    ("merged(fixed(96, 8))", 2, 2, 1003, 64, 128, PAST, OWN_BACK),
    ("merged(fixed(96, 8))", 1, 2, 6001, 64, 128, PAST, OWN_BACK + PARTS_BACK),
    ("merged(fixed(256, 32))", 1, 2, 1100, 64, 128, PAST, CELLS_BACK),
    ("summary(96, 8)", 1, 2, 1000, 64, 128, PAST, CELLS_BACK),
    ("block(96)|summary(96, 8, 0), block(96)|summary(96, 8, 1)", 1, 2, 900, 64, 128, PAST, OWN_BACK),
    ("dense()", 1, 2, 700, 64, 128, PAST, TILES_BACK),
    ("local(2)|column(4)", 1, 2, 2048, 64, 128, [*WALK, *PAST], ["walk_backward", *TILES_BACK]),
    # Programs that walk on for several tiles, from one head into the next.
    ("merged(strided(100))", 4, 8, 3000, 64, 64, [*LANES, *WALK], ["walk_backward", "lane_backward"]),
    ("merged(strided(32))", 4, 4, 3072, 64, 128, [*WALK, *LANES], ["walk_backward", "lane_backward"]),
    ("merged(strided(8))", 4, 9, 1999, 32, 32, [*LANES * 2, *WALK], ["walk_backward", *["lane_backward"] * 2]),
]
SLOW = [
    case for case in CASES[3:] if case[0] not in ("dense()", "block(1024)", "merged(strided(10))", "merged(strided(96))")
]


def one_for_each_head(text, heads):
    found = notation.parse(text)
    return list(found * (heads // len(found)))


@pytest.fixture(scope="module")
def compiler():
    """A process that takes a case and answers what it launches; it does not interpret kernels, as this one does."""
    script = Path(__file__).with_name("dry_run.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    with subprocess.Popen(
        [sys.executable, script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        yield process


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES], ids=str
)
def test_kernels_compile(case, compiler):
    """For what is launched: it fits into a multiprocessor, nearly without spills, and products overlap with arithmetic."""
    check_launches(compiler, case, [*case[:6], "bfloat16"])


def check_launches(compiler, case, request):
    compiler.stdin.write(json.dumps(request) + "\n")
    compiler.stdin.flush()
    answer = json.loads(compiler.stdout.readline())
    assert isinstance(answer, list), answer
    forward, backward = answer
    assert [one["kernel"] for one in forward] == case[6]
    assert [one["kernel"] for one in backward] == case[7]
    for one in forward + backward:
        if "registers" not in one:
            continue
        assert not one["serialized"], one
        assert one["stack"] <= 128, one
        assert one["together"] * (one["shared"] + 1024) <= SHARED_MEMORY + 1024, one
        if one["kernel"].startswith(("walk", "lane", "chunk")):
            assert one["together"] * one["registers"] * 128 <= REGISTERS, one
            panels = {"v": case[5] // case[4], "dv": case[5] // case[4]}
            panels |= {"output": panels["v"], "d_output": panels["v"]}
            assert {name: len(columns) for name, columns in one["copied"].items()} == {
                name: panels.get(name, 1) for name in one["copied"]
            }


SHARED = [  # As CASES, then heads of keys, and documents
    ("local(128)", 1, 6, 1000, 64, 64, WALK * 3, ["walk_backward"] * 3, 2, []),
    ("local(128)", 1, 2, 2000, 64, 64, WALK, ["walk_backward"], 2, [500] * 4),
    ("merged(strided(10))", 1, 4, 2000, 64, 64, [*LANES, *WALK] * 2, ["walk_backward", "lane_backward"] * 2, 2, [1000] * 2),
    (
        "merged(strided(10))",
        1,
        2,
        2400,
        64,
        64,
        [*LANES, *WALK] * 2,
        ["walk_backward", "lane_backward"] * 2,
        2,
        [1000, 700, 700],
    ),
    ("merged(strided(128))", 1, 2, 2000, 64, 64, WALK * 2, ["walk_backward"] * 2, 2, [1000, *[100] * 10]),
    ("local(128)", 1, 2, 60_000, 64, 64, WALK, ["walk_backward"], 2, [59_000, *[99, 101] * 5]),
    ("local(128)", 2, 2, 1000, 64, 64, WALK, ["walk_backward"], 2, [500, 500]),
    ("local(128)", 2, 6, 60_000, 64, 64, WALK * 3, ["walk_backward"] * 3, 2, [59_000, *[99, 101] * 5]),
    ("local(128)", 2, 2, 60_000, 64, 128, WALK, ["walk_backward"], 2, [59_500, 500, 1, 59_999]),
    ("local(100)", 2, 2, 60_000, 32, 32, WALK, ["walk_backward"], 2, [1, 63, 59_936]),
    ("block(128)", 1, 2, 200, 64, 64, WALK, ["walk_backward"], 2, [128, 72]),
    ("local(40)", 2, 2, 62, 64, 64, [], [], 2, [30, 32, 31, 31]),  # Too short for a tile each.
]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_views_and_documents_are_launched_as_plain_calls_are(case, compiler):
    check_launches(compiler, case, [*case[:6], "bfloat16", *case[8:]])


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case, dtype, monkeypatch):
    text, batch, heads, n, d_qk, d_v, forward, backward = case
    ran = []
    forget_plans()
    backend = import_module("longstride.attention.kernels.hopper.launch")
    for name in ("forward", "backward"):
        original = getattr(backend, name)

        def watched(*a, original=original, name=name):
            launches = original(*a)
            ran.extend([name] if launches else [])
            return launches

        monkeypatch.setattr(backend, name, watched)
    torch.use_deterministic_algorithms(True, warn_only=True)  # Which fills empty tensors with NaN.
    try:
        data = [x.cuda() for x in tensors(batch, heads, n, d_qk, d_v, dtype)]
        assert_within_the_rule("triton", *data, one_for_each_head(text, heads))
        apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data]
        patterns = one_for_each_head(text, heads)
        for ours, theirs in zip(results("triton", *apart, patterns), results("triton", *data, patterns)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("forward" in ran, "backward" in ran) == (bool(forward), bool(backward))
