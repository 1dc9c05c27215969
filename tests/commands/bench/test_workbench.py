"""A workbench tells right settings from wrong ones, here in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from longstride.attention.kernels import general
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.launches import KERNELS, LaneKey, LaneSetting, TileKey, TileSetting
from longstride.attention.kernels.settings import processors, trial
from longstride.commands.bench import workbench
from longstride.commands.bench.workbench import Problem, Workbench

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, FLOAT = torch.float16, torch.float32
TILES = [TileKey(kernel, summary, 16, FLOAT) for kernel in ("forward", "dq", "dkv") for summary in (False, True)]
LANES = [LaneKey(kernel, 32, later, 16, HALF) for kernel in ("lane_forward", "lane_backward") for later in (False, True)]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(workbench, "ODD", 193)  # The interpreter takes long.
    return Workbench(DEVICE, repeats=1, batch=1, heads=1, n=192)


@pytest.mark.parametrize("key", [*TILES, *LANES], ids=str)
def test_the_shipped_settings_are_right(bench, key):
    assert bench.launched(key)
    assert bench.problem(key, bench.shipped(key), thorough=False) is None
    (seconds,) = bench.seconds(key, [bench.shipped(key)])
    assert seconds > 0


@pytest.mark.parametrize("key", [TILES[1], LANES[3]], ids=str)
def test_thoroughly(bench, key):
    assert bench.problem(key, bench.shipped(key), thorough=True) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_case_is_one_of_the_kernel(kernel, monkeypatch):
    """At the lengths that count, and without computing anything."""
    monkeypatch.setattr(Launch, "through_triton", lambda *_: None)
    bench = Workbench(DEVICE, repeats=1, batch=1, heads=1)
    tiles = [TileKey(kernel, summary, 16, HALF) for summary in (False, True)]
    lanes = [LaneKey(kernel, lane, later, 16, HALF) for lane in (32, 64, 128) for later in (False, True)]
    for key in tiles if KERNELS[kernel][0] is TileKey else lanes:
        assert bench.launched(key)
        for case in bench._more_cases(key):
            with trial({}) as used:
                bench._results(key, case)
            assert key in used, case.pattern


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        (TILES[0], TileSetting(64, 16, 8, 2)),
        (TILES[5], TileSetting(16, 64, 2, 1)),
        (LANES[0], LaneSetting(2, 1, 1)),
        (LANES[0], None),
    ],
    ids=str,
)
def test_the_candidate_is_what_runs(bench, key, setting, monkeypatch):
    ran = []
    run = Launch.through_triton
    monkeypatch.setattr(Launch, "through_triton", lambda self, tensors: (ran.append(self), run(self, tensors)))
    assert bench.problem(key, setting, thorough=False) is None
    name, constants = ran[-1].kernel.__name__, ran[-1].constants
    if setting is None:
        assert name == "forward"
    elif isinstance(setting, TileSetting):
        assert name == {"forward": "forward", "dkv": "backward_dkv"}[key.kernel]
        assert tuple(constants[name] for name in ("ROWS", "COLUMNS", "num_warps", "num_stages")) == setting
    else:
        assert name == key.kernel
        assert (constants["num_warps"], constants["STAGES"]) == setting[:2]
        assert ran[-1].programs <= processors(DEVICE) * setting.per_processor


def test_a_wrong_result_is_seen(bench, monkeypatch):
    """One row off by a quarter of its size, a row that is never written, or gradients that belong to another scale."""
    right = bench.forward

    def spoiled(factor):
        def forward(*arguments):
            output, log_sum_exp = right(*arguments)
            output[0, 0, 77] *= factor
            return output, log_sum_exp

        return forward

    for key in (TILES[0], TileKey("forward", True, 16, HALF)):
        for factor, wrong in ((1, False), (1.25, True), (float("nan"), True)):
            bench.forward = spoiled(factor)
            found = bench.problem(key, bench.shipped(key), thorough=False)
            assert found == (Problem(True, f"the first result for {bench.timed.pattern} is wrong") if wrong else None)
    back = bench.backward
    bench.backward = lambda *arguments: tuple(1.02 * x for x in back(*arguments))
    assert bench.problem(TILES[2], bench.shipped(TILES[2]), thorough=False).wrong


def test_one_row_is_enough_and_so_is_a_little_everywhere():
    true = torch.randn(1, 1, 5000, 16)
    row = true.clone()
    row[0, 0, 77] *= 1.1
    assert workbench._agrees(true.to(HALF), true)
    assert not workbench._agrees(row.to(HALF), true)
    assert not workbench._agrees((1.01 * true).to(HALF), true)


def test_what_was_there_before_does_not_pass_for_a_result(bench, monkeypatch):
    key = TILES[0]
    assert bench.problem(key, bench.shipped(key), thorough=False) is None
    monkeypatch.setattr(Launch, "through_triton", lambda *_: None)
    assert bench.problem(key, TileSetting(16, 16, 4, 1), thorough=False).wrong
    bench.forward = lambda q, *_: (torch.empty_like(q),)
    monkeypatch.setattr(workbench, "_agrees", lambda ours, true: ours.isnan().all())
    assert bench.problem(key, TileSetting(16, 16, 4, 1), thorough=False) is None
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_does_not_run_is_a_reason_and_no_end(bench):
    def forward(*_):
        raise RuntimeError("out of resource: shared memory, Required: 262144\nand more")

    bench.forward = forward
    found = bench.problem(TILES[0], bench.shipped(TILES[0]), thorough=False)
    assert found == Problem(False, "RuntimeError: out of resource: shared memory, Required: 262144")


def test_it_goes_on_where_the_shipped_setting_does_not_run(bench, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(Launch, "through_triton", broken)
    assert bench.launched(TILES[0])
    assert bench.problem(TILES[0], bench.shipped(TILES[0]), thorough=False) is not None


def test_too_little_memory_is_not_the_candidates_fault(bench):
    def forward(*_):
        raise torch.OutOfMemoryError("out of memory")

    bench.forward = forward
    with pytest.raises(torch.OutOfMemoryError):
        bench.problem(TILES[0], bench.shipped(TILES[0]), thorough=False)


def test_a_gpu_that_is_broken_ends_it(bench, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.problem(TILES[0], bench.shipped(TILES[0]), thorough=False)
    bench.forward = broken
    bench.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(
        RuntimeError,
        match=r"bench tune: TileSetting\(rows=16.* made the GPU unusable, nothing is saved: .* illegal memory access",
    ):
        bench.problem(TILES[0], TileSetting(16, 16, 4, 1), thorough=False)


def test_a_kernel_that_another_stands_for_is_not_launched(bench, monkeypatch):
    monkeypatch.setattr(general, "_sizes", lambda *_: TileSetting(16, 16, 4, 1))
    assert not bench.launched(TILES[0])
    assert bench.launched(LANES[0])


def test_every_timed_shape_is_the_same_for_a_kernel():
    assert {workbench._timed_pattern(key, 12_288) for key in TILES} == {"local(128)", "block(128) | summary(128, 32)"}
    assert workbench._timed_pattern(LANES[1], 12_288) == "local(1) | column(384)"
