import pytest
import torch

from longstride.common.out_of_memory import is_out_of_gpu_memory, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "of_gpu"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), False),
        (MemoryError(), False),
    ],
    ids=str,
)
def test_a_lack_of_memory(error, of_gpu):
    assert is_out_of_memory(error)
    assert is_out_of_gpu_memory(error) == of_gpu


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")], ids=str
)
def test_other_errors(error):
    assert not is_out_of_memory(error)
