import ctypes
from types import SimpleNamespace

import pytest
import torch

from longstride.common import device
from longstride.common.device import keep_freed_memory, prefers_bfloat16


@pytest.mark.parametrize(
    ("largest", "thresholds", "kept"),
    [(2**31, [2**30], True), (2**25, [2**30, 2**25], True), (0, [2**30, 2**25], False)],
)
def test_freed_memory_is_kept_as_far_as_the_c_library_allows(largest, thresholds, kept, monkeypatch):
    asked = []

    def mallopt(option, value):
        asked.append((option, value))
        return int(option == -1 or value <= largest)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory() is kept
    assert asked == [(-1, 2**31 - 1), *((-3, value) for value in thresholds)]


def test_another_c_library(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert keep_freed_memory() is False


@pytest.mark.parametrize(
    ("flags", "prefers"),
    [("fpu avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("fpu avx2 avx512f avx512_vnni", False), (None, False)],
)
def test_which_cpus_prefer_bfloat16(flags, prefers, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(
            f"processor\t: 0\nmodel name\t: A CPU: fast\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: avx512_bf16\n"
        )
    monkeypatch.setattr(device, "Path", lambda _: path)
    assert prefers_bfloat16.__wrapped__(torch.device("cpu")) is prefers
    assert device._processor() == ("A CPU: fast" if flags else device.platform.processor() or device.platform.machine())


@pytest.mark.parametrize(("capability", "prefers"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_which_gpus_prefer_bfloat16(capability, prefers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert prefers_bfloat16.__wrapped__(torch.device("cuda", 0)) is prefers
