"""Backends are asked in order, and the first that takes a pass computes it."""

import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import call as calls
from longstride.attention.kernels import general
from longstride.attention.kernels.launch import forget_plans
from longstride.patterns import Column, Local


def test_a_new_backend_is_one_module_and_one_line(monkeypatch):
    """It takes windows forward, and leaves all else to the next."""
    asked = []
    new = ModuleType("longstride.attention.kernels.new")

    def forward(call, one, accumulate):
        asked.append(("forward", accumulate))
        return general.forward(call, one, accumulate) if one.jobs[0].index_stride == 1 else None

    new.forward, new.backward = forward, lambda *arguments: asked.append(("backward", arguments[2]))
    monkeypatch.setitem(sys.modules, new.__name__, new)
    monkeypatch.setattr(calls, "BACKENDS", (("new", lambda device: True), *calls.BACKENDS))
    calls.backends.cache_clear()
    forget_plans()
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        q, k, v = torch.randn(3, 1, 2, 50, 16, device=device, requires_grad=True).unbind()
        pattern = Local(5) | Column(5)
        output = attend(q, k, v, pattern, impl="triton")
        torch.testing.assert_close(output, attend(q, k, v, pattern, impl="reference"))
        output.sum().backward()
        assert asked == [("forward", False), ("forward", True), ("backward", False), ("backward", True)]
    finally:
        calls.backends.cache_clear()
        forget_plans()
