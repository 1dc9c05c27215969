"""attention/implementation.py: what runs on a device, and what is refused."""

import pytest
import torch

from longstride import Local, attend
from longstride.attention.implementation import choose, implementation_name


def test_triton_is_not_silently_replaced(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"impl = 'triton' on cpu needs a CUDA device.*'blocked' runs on every device"):
        attend(x, x, x, Local(2), impl="triton")
    monkeypatch.setattr("longstride.attention.implementation.HAS_TRITON", False)
    for impl in ("auto", "triton"):
        with pytest.raises(RuntimeError, match=rf"impl = '{impl}' on cuda needs Triton, .* pip install triton"):
            choose(impl, torch.device("cuda"))


def test_auto_is_triton_on_a_gpu():
    assert choose("auto", torch.device("cuda")).impl == "triton"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("impl", ["auto", "reference", "blocked", "triton"])
def test_a_call_runs_what_choose_names(impl, device, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert implementation_name(impl, device) == choose(impl, torch.device(device)).impl
