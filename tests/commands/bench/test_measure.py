import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch

from longstride.commands.bench import measure
from longstride.commands.bench.measure import elapsed_seconds, exponent, host_seconds, peak_bytes, seconds_each

CPU = torch.device("cpu")


def test_peak_is_the_most_that_is_held_at_once():
    def call():
        first = torch.zeros(1000, dtype=torch.float32)
        del first
        second = torch.zeros(3000, dtype=torch.float32)
        third = second + 1
        return second, third

    assert 2 * 3000 * 4 <= peak_bytes(call, CPU) < 2 * 3000 * 4 + 100  # and a few bytes for the 1


def test_calls_take_turns():
    order = []
    times = seconds_each({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU)
    assert order == ["a", "b"] * 4  # once to warm up
    assert times.keys() == {"a", "b"}
    assert all(time >= 0 for time in times.values())


def test_the_median_of_the_clock_given_counts_and_contexts_are_not_timed():
    order, times = [], iter([5.0, 1.0, 3.0])

    @contextmanager
    def within():
        order.append("in")
        yield
        order.append("out")

    def clock(call, device):
        order.append("clock")
        call()
        return next(times)

    assert seconds_each({"a": lambda: order.append("a")}, 3, CPU, clock, {"a": within}) == {"a": 3.0}
    assert order == ["in", "a", "out"] + ["in", "clock", "a", "out"] * 3


class FakeGpu:
    """A GPU behind a queue: a call costs the host 40 us and the GPU `busy` seconds more, waited for in synchronize."""

    def __init__(self, monkeypatch, busy):
        self.now, self.free, self.busy, self.calls = 0.0, 0.0, busy, 0
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def call(self):
        self.calls += 1
        self.now += 40e-6
        self.free = max(self.free, self.now) + self.busy

    def synchronize(self, device):
        self.now = max(self.now, self.free)


@pytest.mark.parametrize(("busy", "calls"), [(0, 101), (10e-6, 101), (20e-3, 21), (1.0, 4)])
def test_host_time_is_that_until_a_call_returns_whatever_the_gpu_takes(monkeypatch, busy, calls):
    gpu = FakeGpu(monkeypatch, busy)
    assert host_seconds(gpu.call, torch.device("cuda")) == pytest.approx(40e-6)
    assert gpu.calls == calls  # One to see how long it takes.
    assert gpu.now == pytest.approx(gpu.free if busy else gpu.now)  # Nothing is left in the queue for the next one.


def test_host_time_is_that_of_the_round_that_nobody_disturbs(monkeypatch):
    gpu = FakeGpu(monkeypatch, 0)

    def call():
        gpu.call()
        gpu.now += 0 if 42 <= gpu.calls <= 61 else 100e-6  # The third round.

    assert host_seconds(call, torch.device("cuda")) == pytest.approx(40e-6)


def test_elapsed_time_is_the_median_of_do_bench(monkeypatch):
    asked = []

    def do_bench(call, warmup, rep, return_mode):
        asked.append(return_mode)
        call()
        return 0.25

    module = ModuleType("triton.testing")
    module.do_bench = do_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.testing", module)
    gpu = FakeGpu(monkeypatch, 0)
    assert elapsed_seconds(gpu.call, torch.device("cuda")) == 0.25e-3
    assert (gpu.calls, asked) == (1, ["median"])


def test_exponent_is_the_slope_of_a_power():
    sizes = [3, 10, 50, 400]
    assert exponent(sizes, [7 * size**1.5 for size in sizes]) == pytest.approx(1.5)
