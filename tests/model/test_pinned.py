import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from longstride.model.host_inputs import HostInputs, HostMemory
from longstride.model.pinned import PinError, pinned

GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    """A CUDA runtime that records which memory is pinned: bytes by address."""
    held = {}

    def register(address, size, flags):
        held[address] = size
        return torch.cuda.cudart.success

    def unregister(address):
        ctypes.string_at(address, held.pop(address))  # The memory is still mapped.

    def runtime():
        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    runtime.success = 0
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: pytest.fail("an error") if result else None)
    return held


def test_memory_is_pinned_as_long_as_a_view_of_it_lives(driver):
    x = pinned(torch.Size((3, 5)), torch.bfloat16, GPU)
    assert driver == {x.data_ptr(): 30}
    assert torch.equal(x, torch.zeros(3, 5, dtype=torch.bfloat16))
    part = x[1]
    del x
    part.fill_(7)
    assert len(driver) == 1
    del part
    assert not driver


def test_nothing_is_rounded_up(driver):
    x = pinned(torch.Size((2**20 + 4,)), torch.uint8, GPU)
    assert driver == {x.data_ptr(): 2**20 + 4}


LIKE = SimpleNamespace(shape=torch.Size((4,)), dtype=torch.float32, is_cuda=True, device=GPU)


def test_buffers_of_a_gpu_are_pinned_once(driver):
    memory = HostMemory()
    first = memory.take(LIKE)
    memory.give_back(first)
    assert memory.take(LIKE) is first
    assert list(driver.values()) == [16]


def test_threads_pin_the_buffers_that_are_missing(driver):
    memory = HostMemory()
    for _ in range(2):  # The second time, one is there and two are coming.
        memory.expect(LIKE, 3)
        taken = memory.take(LIKE)
        memory.give_back(taken)
    buffers = [memory.take(LIKE) for _ in range(3)]
    assert sorted(driver) == sorted(buffer.data_ptr() for buffer in buffers)
    assert not any(memory.coming.values())


def test_a_failure_to_pin_reaches_the_caller(driver, monkeypatch):
    def refuse(*_):
        raise RuntimeError("too much is pinned")

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    memory = HostMemory()
    memory.expect(LIKE, 1)
    with pytest.raises(RuntimeError, match="too much is pinned"):
        memory.take(LIKE)


def test_memory_that_cannot_be_had_or_pinned_is_named(driver, monkeypatch):
    def refuse(result):
        raise torch.cuda.CudaError.__new__(torch.cuda.CudaError)  # Its message needs a GPU.

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(PinError, match=r"^0\.25 GiB of host memory could not be pinned: "):
        pinned(torch.Size((2**28,)), torch.uint8, GPU)
    with pytest.raises(PinError, match="could not be pinned"):
        pinned(torch.Size((2**60,)), torch.uint8, GPU)


def test_the_input_before_is_fetched_while_a_block_is_computed():
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    inputs = HostInputs(HostMemory(), tensors[0], 3)
    stored = [inputs.store(x) for x in tensors]
    inputs.leave_device()
    assert [one.on_device for one in stored] == [None] * 3
    assert torch.equal(stored[2].fetch(), tensors[2])
    assert stored[0].on_device is None
    assert torch.equal(stored[1].on_device, tensors[1])
