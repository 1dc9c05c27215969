import pytest
import torch

from longstride.training.speed import matrix_rate, peak_memory


def test_a_cpu_has_neither():
    assert matrix_rate(torch.device("cpu"), torch.float32) is None
    assert peak_memory(torch.device("cpu")) is None


def test_a_gpu_with_too_little_memory_for_the_product_has_no_rate(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "randn", fail)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    assert matrix_rate(torch.device("cuda"), torch.float32) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_both():
    device = torch.device("cuda")
    kept = torch.ones(2**20, device=device)
    assert matrix_rate(device, torch.bfloat16) > 0
    assert peak_memory(device) >= kept.numel() * 4
