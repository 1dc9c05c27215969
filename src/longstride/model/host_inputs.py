"""Inputs of segments in host memory: copied there in the forward pass and back in the backward pass, beside the computation.

A segment is a block, or several of which only the first keeps its input. On a GPU the copies run on a stream of their own,
from and to pinned memory. Forward, the input of a segment is on the device until that of the next one is stored; backward,
the input of the segment before is fetched while a segment is computed. So two of them are on the device at a time. On
a CPU the same functions copy from one tensor to another.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from longstride.model.pinned import pinned

THREADS = 4
"""Threads that pin buffers. Each uses PyTorch's threads, too."""


class HostMemory:
    """Buffers that are used again in every step, since pinning memory takes long."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.coming: dict[Any, list[Future[Tensor]]] = {}
        """Buffers that threads are pinning."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: Any) -> "HostMemory":
        return HostMemory()

    def expect(self, like: Tensor, count: int) -> None:
        """Starts to pin the buffers that are missing for `count` tensors like this one, while the first are computed."""
        key = like.shape, like.dtype
        coming = self.coming.setdefault(key, [])
        missing = count - len(self.free.get(key, [])) - len(coming)
        if like.is_cuda and missing > 0:
            pool = ThreadPoolExecutor(THREADS)
            coming.extend(pool.submit(pinned, *key, like.device) for _ in range(missing))
            pool.shutdown(wait=False)

    def take(self, like: Tensor) -> Tensor:
        key = like.shape, like.dtype
        if self.free.get(key):
            return self.free[key].pop()
        if self.coming.get(key):
            return self.coming[key].pop(0).result()
        return pinned(*key, like.device) if like.is_cuda else torch.empty(like.shape, dtype=like.dtype)

    def give_back(self, buffer: Tensor) -> None:
        self.free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of all copies of a device. Copies from and to one buffer are thus in order."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class HostInputs:
    """The inputs of one forward pass, which the backward pass fetches in the opposite order."""

    def __init__(self, memory: HostMemory, like: Tensor, count: int) -> None:
        """`count`: of the inputs that are to come, all like this one."""
        self.memory = memory
        memory.expect(like, count)
        self.newest: StoredInput | None = None

    def store(self, h: Tensor) -> "StoredInput":
        """Starts to copy h to the host."""
        self.leave_device()
        self.newest = StoredInput(h, self.memory, self.newest)
        return self.newest

    def leave_device(self) -> None:
        """Frees the newest input on the device, which `store` leaves there for a backward pass that may follow at once."""
        if self.newest is not None:
            self.newest.leave_device()


class StoredInput:
    def __init__(self, h: Tensor, memory: HostMemory, previous: "StoredInput | None") -> None:
        self.memory, self.previous, self.device = memory, previous, h.device
        self.buffer: Tensor | None = memory.take(h)
        self.on_device: Tensor | None = h.detach()
        self._copied = self._copy(h, self.buffer)

    def leave_device(self) -> None:
        """Frees the tensor on the device. Kernels that are launched later, and may get its memory, wait for the copy."""
        self._wait()
        self.on_device = None

    def fetch(self) -> Tensor:
        """Returns the tensor on the device, and starts to copy the one that was stored before."""
        if self.buffer is None:
            raise RuntimeError("the input of a block in host memory can be fetched once; call backward() once for a loss")
        h = self._load()
        self._wait()
        self.memory.give_back(self.buffer)
        self.buffer, self.on_device = None, None
        if self.previous is not None:
            self.previous._load()
        return h

    def _load(self) -> Tensor:
        assert self.buffer is not None
        if self.on_device is None:
            self.on_device = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, device=self.device)
            self._copied = self._copy(self.buffer, self.on_device)
        return self.on_device

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        if self.device.type != "cuda":
            target.copy_(source)
            return None
        stream = self.memory.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
