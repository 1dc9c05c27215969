"""Marks, by which the work of a device is timed."""

import pytest
import torch

from longstride.sampling.marks import GpuMark, HostMark, set_mark


def test_the_time_of_the_host(monkeypatch):
    seconds = iter([3.0, 5.5])
    monkeypatch.setattr("longstride.sampling.marks.time.perf_counter", lambda: next(seconds))
    first, second = set_mark(torch.device("cpu")), set_mark(torch.device("cpu"))
    assert isinstance(first, HostMark)
    assert second.seconds_since(first) == 2.5


def test_the_time_of_a_gpu_is_that_of_events(monkeypatch):
    """In seconds, once the later one is reached; setting a mark waits for nothing."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            seen.append(("record", stream))

        def synchronize(self):
            seen.append("synchronize")

        def elapsed_time(self, later):
            seen.append(later)
            return 250.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"stream of {device}")
    first, second = (set_mark(torch.device("cuda:1")) for _ in range(2))
    assert isinstance(first, GpuMark)
    assert seen == [("record", "stream of cuda:1")] * 2
    assert second.seconds_since(first) == 0.25
    assert seen[2:] == ["synchronize", second.event]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    first = set_mark(device)
    x @ x
    assert 0 < set_mark(device).seconds_since(first) < 60
