"""Which errors are a lack of memory. Nothing here imports PyTorch."""

ON_A_CPU = ("can't allocate memory", "Storage size calculation overflowed", "unable to mmap")
"""PyTorch's messages on a CPU, each in a plain RuntimeError."""
ON_A_GPU = ("CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of what allocates beside PyTorch's tensors: the driver, Triton and cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in main memory."""
    return isinstance(error, MemoryError) or is_out_of_gpu_memory(error) or _says(error, ON_A_CPU)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or _says(error, ON_A_GPU)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(some in str(error) for some in words)
