"""The workbench of `bench tune` tells right settings from wrong ones, here in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from longstride.attention.kernels import call as calls
from longstride.attention.kernels import general
from longstride.attention.kernels.launch import Launch
from longstride.attention.kernels.saved import KEYS, Setting
from longstride.attention.kernels.settings import processors, trial
from longstride.commands.bench import tune
from longstride.commands.bench.tune import Workbench, patterns
from longstride.patterns import Local

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, FLOAT = torch.float16, torch.float32
TILES = [key for key in KEYS.values() if not key.lane and key.width == 16 and key.dtype == FLOAT]
LANES = [key for key in KEYS.values() if key.lane == 32 and key.width == 16 and key.dtype == HALF]
FORWARD = KEYS["forward d16 float32"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The interpreter takes long."""
    monkeypatch.setattr(tune, "TIMED", (1, 1, 192))
    monkeypatch.setattr(tune, "ODD", (1, 2, 193))


@pytest.mark.parametrize("key", [*TILES, *LANES], ids=str)
def test_the_shipped_settings_are_right(key):
    bench = Workbench(key, DEVICE)
    assert bench.is_launched()
    assert bench.problem(bench.shipped) is None
    (seconds,) = bench.seconds([bench.shipped], 1)
    assert seconds > 0


@pytest.mark.parametrize("name", ["forward summary d16 float32", "lane_backward 32 accumulate d16 float16"])
def test_in_all_branches(name):
    bench = Workbench(KEYS[name], DEVICE)
    assert bench.problem_elsewhere(bench.shipped) is None


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv", "lane_forward", "lane_backward"])
def test_every_pattern_launches_the_kernel(kernel, monkeypatch):
    """At the lengths that are used, without computing anything."""
    monkeypatch.undo()
    monkeypatch.setattr(Launch, "through_triton", lambda *_: None)
    monkeypatch.setattr(tune, "TIMED", (1, 1, tune.TIMED[2]))
    prepare = Workbench._prepare
    unused = lambda self, tensors, impl: prepare(self, tensors, impl) if impl == "triton" else list  # noqa: E731
    monkeypatch.setattr(Workbench, "_prepare", unused)
    for key in KEYS.values():
        if key.kernel == kernel and key.width == 16 and key.dtype == HALF:
            for pattern in (None, *patterns(key, tune.ODD[2])):
                assert Workbench(key, DEVICE, pattern).is_launched(), (key, pattern)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("forward d16 float32", Setting(64, 16, 8, 2)),
        ("dkv summary d16 float32", Setting(16, 64, 2, 1)),
        ("lane_forward 32 d16 float16", Setting(32, 32, 2, 1, 1)),
        ("lane_forward 32 d16 float16", None),
    ],
)
def test_the_candidate_is_what_runs(name, setting, monkeypatch):
    bench = Workbench(KEYS[name], DEVICE)
    ran = []
    run = Launch.through_triton
    monkeypatch.setattr(Launch, "through_triton", lambda self, tensors: (ran.append(self), run(self, tensors)))
    assert bench.problem(setting) is None
    kernel, constants = ran[-1].kernel.__name__, ran[-1].constants
    if setting is None:
        assert kernel == "forward"
        return
    assert kernel == {"dkv": "backward_dkv"}.get(bench.key.kernel, bench.key.kernel)
    tiles = constants["TILES"]
    assert (constants["num_warps"], constants["num_stages"]) == setting[2:4]
    assert tiles.rows.value == setting.rows
    if bench.key.lane:
        assert tiles.stages.value == setting.stages
        assert ran[-1].programs <= processors(DEVICE) * setting.per_processor
    else:
        assert tiles.columns.value == setting.columns


@pytest.mark.parametrize("name", ["forward d16 float32", "forward summary d16 float16"])
@pytest.mark.parametrize(("factor", "wrong"), [(1, False), (1.25, True), (float("nan"), True)])
def test_a_wrong_row_is_seen(name, factor, wrong):
    """One row off by a quarter of its size, or never written."""
    bench = Workbench(KEYS[name], DEVICE)
    call = bench.call

    def spoiled():
        (output,) = call()
        output[0, 0, 77] *= factor
        return [output]

    bench.call = spoiled
    expected = f"WRONG result for {bench.pattern} with {bench.shipped}" if wrong else None
    assert bench.problem(bench.shipped) == expected


def test_a_wrong_gradient_is_seen():
    bench = Workbench(KEYS["dkv d16 float32"], DEVICE)
    call = bench.call
    bench.call = lambda: [call()[0], 1.02 * call()[1]]
    assert bench.problem(bench.shipped).startswith("WRONG result")


def test_one_row_is_enough_and_so_is_a_little_everywhere():
    true = torch.randn(1, 1, 5000, 16)
    row = true.clone()
    row[0, 0, 77] *= 1.1
    assert tune._agrees(true.to(HALF), true)
    assert not tune._agrees(row.to(HALF), true)
    assert not tune._agrees((1.01 * true).to(HALF), true)


def test_earlier_results_in_reused_memory_do_not_pass(monkeypatch):
    bench = Workbench(FORWARD, DEVICE)
    assert bench.problem(bench.shipped) is None
    monkeypatch.setattr(Launch, "through_triton", lambda *_: None)
    assert bench.problem(Setting(16, 16, 4, 1)).startswith("WRONG result")
    bench.call = lambda: [torch.empty(1, 1, 192, 16, device=DEVICE)]
    monkeypatch.setattr(tune, "_agrees", lambda ours, exact: ours.isnan().all())
    assert bench.problem(Setting(16, 16, 4, 1)) is None
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_does_not_run_is_a_reason(monkeypatch):
    bench = Workbench(FORWARD, DEVICE)

    def broken(*_):
        raise RuntimeError("out of resource: shared memory, Required: 262144\nand more")

    monkeypatch.setattr(Launch, "through_triton", broken)
    assert bench.is_launched()
    assert bench.problem(bench.shipped) == "RuntimeError: out of resource: shared memory"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_lack_of_memory_is_not_the_settings_fault():
    bench = Workbench(FORWARD, DEVICE)

    def full():
        raise torch.OutOfMemoryError("out of memory")

    bench.call = full
    with pytest.raises(torch.OutOfMemoryError):
        bench.problem(bench.shipped)


def test_a_kernel_is_not_launched_where_another_takes_its_place(monkeypatch):
    def forward(call, one, accumulate):
        with trial({}):
            return general.forward(call, one, accumulate)

    monkeypatch.setattr(calls, "backends", lambda device: (type("Other", (), {"forward": staticmethod(forward)}),))
    assert not Workbench(FORWARD, DEVICE).is_launched()


def test_the_timed_patterns():
    assert patterns(FORWARD, 12_288)[0] == Local(128)
    assert str(patterns(KEYS["lane_forward 32 accumulate d16 float16"], 12_288)[0]) == "Local(1) | Column(384)"
