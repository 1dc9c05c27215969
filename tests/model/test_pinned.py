from types import SimpleNamespace

import pytest
import torch

from longstride.model.host_inputs import HostMemory
from longstride.model.pinned import pinned


@pytest.fixture
def driver(monkeypatch):
    """A CUDA runtime that records which memory is pinned: bytes by address."""
    held = {}

    def register(address, size, flags):
        held[address] = size
        return torch.cuda.cudart.success

    def runtime():
        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=held.pop)

    runtime.success = 0
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: pytest.fail("an error") if result else None)
    return held


def test_memory_is_pinned_as_long_as_a_view_of_it_lives(driver):
    x = pinned(torch.Size((3, 5)), torch.bfloat16)
    assert driver == {x.data_ptr(): 30}
    assert torch.equal(x, torch.zeros(3, 5, dtype=torch.bfloat16))
    part = x[1]
    del x
    part.fill_(7)
    assert len(driver) == 1
    del part
    assert not driver


def test_nothing_is_rounded_up(driver):
    x = pinned(torch.Size((2**20 + 4,)), torch.uint8)
    assert driver == {x.data_ptr(): 2**20 + 4}


def test_buffers_of_a_gpu_are_pinned_once(driver):
    memory, like = HostMemory(), SimpleNamespace(shape=torch.Size((4,)), dtype=torch.float32, is_cuda=True)
    first = memory.take(like)
    memory.give_back(first)
    assert memory.take(like) is first
    assert list(driver.values()) == [16]
