"""Tiles of documents: which there are, and short lanes of documents in one tile, against an explicit mask."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from longstride.attention.kernels import work
from longstride.attention.kernels.jobs import passes
from longstride.attention.kernels.launch import Launch, forget_plans
from longstride.attention.kernels.primitives import LANE_WORK_FIELDS
from longstride.attention.kernels.saved import Key
from longstride.attention.kernels.settings import Gpu, shipped
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary
from tests.attention.layouts import Case
from tests.strategies import patterns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
MERGED = Local(5) | Column(5)
LENGTHS = [31, 3, 10, 11, 5]
"""Of documents: with long lanes, shorter than a stride, and with no pair beyond the window of `MERGED`."""


def document_rows(lengths):
    return work.document_table((1, 1, sum(lengths), 1), (1, 1, sum(lengths), 1), lengths)


def seen_beyond(one, n):
    """The pairs of a job's lanes, bool [n, n]."""
    job, index = one.jobs[0], torch.arange(n)
    lane, place = index % job.index_stride, index // job.index_stride
    if job.lane_stride > 1:
        lane, place = index // job.lane_stride, index % job.lane_stride
    distance = place[:, None] - place
    return (lane[:, None] == lane) & (distance >= job.near) & (distance <= job.far)


@given(patterns(9), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.sampled_from([16, 32]), st.booleans())
@settings(max_examples=100)
def test_tiles_hold_every_position_once(pattern, lengths, size, accumulate):
    """accumulate: at least every one that sees a key, or that a query sees."""
    documents = document_rows(lengths)
    for one in passes(pattern.text, max(lengths)):
        job = one.jobs[0]
        for of_keys in (False, True):
            held = Counter()
            for _, document, lane, first in work.tile_items(one, documents, size, accumulate, of_keys).tolist():
                n, start = lengths[document], lane * job.lane_stride
                indices = range(first, min(first + size, job.limit))
                found = [start + index * job.index_stride for index in indices]
                held.update((document, position) for position in found if position < n)
            assert set(held.values()) <= {1}
            for document, n in enumerate(lengths):
                needed = range(n)
                if accumulate:
                    needed = seen_beyond(one, n).any(0 if of_keys else 1).nonzero().flatten().tolist()
                assert {(document, position) for position in needed} <= set(held)


@given(st.integers(2, 9), st.lists(st.integers(1, 70), min_size=2, max_size=4), st.booleans())
@settings(max_examples=100)
def test_tiles_of_lanes_hold_every_position_once(step, lengths, accumulate):
    documents = document_rows(lengths)
    one = passes(f"local({step})|column({step})", max(lengths))[1]
    job, size = one.jobs[0], 128
    held = Counter()
    for row in work.lane_items(one, documents, size, accumulate).tolist():
        tile = work.LaneWork(*row)
        assert tile.together * -(-tile.n // job.index_stride) <= size
        for lane in range(tile.first, min(tile.first + tile.together, job.lanes)):
            held.update(range(tile.document + lane, tile.document + tile.n, job.index_stride))
    assert set(held.values()) <= {1}
    start = 0
    for n in lengths:
        if not accumulate or seen_beyond(one, n).any():
            assert set(range(start, start + n)) <= set(held)
        else:
            assert set(held).isdisjoint(range(start, start + n))
        start += n


def test_the_kernels_know_the_fields():
    assert len(work.LaneWork._fields) == LANE_WORK_FIELDS.value


@pytest.fixture
def ran(monkeypatch):
    """The names of the kernels that run."""
    names = []
    run = Launch.through_triton

    def record(self, tensors):
        names.append(self.kernel.__name__)
        return run(self, tensors)

    monkeypatch.setattr(Launch, "through_triton", record)
    forget_plans()
    yield names
    forget_plans()


NUMBERS = torch.tensor([[0] * 31 + [1] * 29, [0] * 7 + [1] * 40 + [2] * 13])
CASES = {
    "merged": Case([MERGED] * 2, 2, 1, 60, 60, 16, 16, {"documents": LENGTHS}),
    "batch": Case([MERGED] * 2, 2, 2, 60, 60, 32, 24, {"documents": LENGTHS}),
    "columns": Case([Column(7)] * 2, 2, 1, 60, 60, 16, 20, {"documents": LENGTHS}),
    "each its own": Case([Column(6), Column(9)], 2, 1, 60, 60, 16, 16, {"documents": LENGTHS}),
    "a window": Case([Dilated(3, 9)], 1, 1, 60, 60, 16, 16, {"documents": LENGTHS}),
    "exclusions": Case([Column(4) | Column(6)] * 2, 2, 1, 60, 60, 16, 16, {"documents": LENGTHS}),
    "of rows": Case([Column(4)] * 2, 2, 2, 60, 60, 16, 16, {"documents": NUMBERS.to(DEVICE)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_short_lanes_of_documents_share_a_tile(case, ran, poisoned):
    case.check("triton", HALF, DEVICE, of_lse=False, apart=case is CASES["batch"])
    lanes = 2 if case is CASES["exclusions"] else 1  # passes of residue classes
    assert ran.count("lane_forward") == ran.count("lane_backward") == lanes


OTHERS = {
    "float32": (CASES["columns"], torch.float32, False),
    "the lse's slope": (CASES["columns"], HALF, True),
    "shared keys": (CASES["columns"]._replace(kv_heads=1), HALF, False),
    "fewer queries": (CASES["columns"]._replace(n_q=40), HALF, False),
    "blocks": (CASES["columns"]._replace(heads=[Block(8), Block(8) | Summary(8, 2)]), HALF, False),
    "one window": (CASES["columns"]._replace(heads=[Dense(), Column(7)]), HALF, False),
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_other_calls_do_not(others, ran):
    case, dtype, of_lse = others
    case.check("triton", dtype, DEVICE, of_lse)
    assert "lane_backward" not in ran
    assert of_lse or "lane_forward" not in ran


def test_lanes_of_documents_do_not_see_each_other(ran):
    """Not one bit of a document depends on another, NaN included; nor on the future."""
    CASES["merged"].check_isolation("triton", HALF, DEVICE, [(0, 31), (34, 44), (44, 55)], 20, 1e4)
    assert "lane_forward" in ran
    assert "lane_backward" in ran


def test_documents_without_a_pair_in_a_pass_have_no_launch_there(ran):
    """The same results as in a pass of the longest document, whose lanes are of documents that need none."""
    Case([MERGED] * 2, 2, 1, 21, 21, 16, 16, {"documents": [10, 8, 3]}).check("triton", HALF, DEVICE, of_lse=False)
    assert ran == ["forward", "backward_delta", "backward_dq", "backward_dkv"]


def test_the_kernels_of_short_lanes_compile_for_hopper():
    """Programs that share a multiprocessor fit into its shared memory."""
    on = Gpu("NVIDIA H200", 227 * 2**10)
    keys = [
        Key(kernel, width, torch.bfloat16, lane=32, accumulate=True)
        for kernel in ("lane_forward", "lane_backward")
        for width in (64, 128)
    ]
    chosen = [shipped(key, on) for key in keys]
    rows = [[key.kernel, False, key.width, "bfloat16", *setting[:4], True] for key, setting in zip(keys, chosen)]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("ahead_of_time.py"), "90", json.dumps(rows)],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for takes, setting in zip(json.loads(done.stdout), chosen, strict=True):
        assert 0 < takes * setting.per_processor <= on.shared_memory
