import pytest
import torch

from longstride.training.speed import matrix_rate, peak_memory


def test_a_cpu_has_neither():
    assert matrix_rate(torch.device("cpu"), torch.float32) is None
    assert peak_memory(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_both():
    device = torch.device("cuda")
    kept = torch.ones(2**20, device=device)
    assert matrix_rate(device, torch.bfloat16) > 0
    assert peak_memory(device) >= kept.numel() * 4
