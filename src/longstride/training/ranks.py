"""Processes that train one model, as torchrun starts them: ranks, collectives, and errors that reach all of them.

    torchrun --nproc-per-node 8 -m longstride train enwik8 --data enwik8 --out RUN

An error on one process is raised on all: otherwise they would wait for it without a message.
"""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from longstride.common.device import choose_device

Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=Exception)
ERROR_TYPES: tuple[type[Exception], ...] = (ValueError, OSError, FloatingPointError, RuntimeError)
"""Types in which an error of another process is raised: the first one it is an instance of, otherwise the last."""
REPORTED = "The first process says this, too."
"""Note on an error that rank 0 also reports, so that other processes need not show it."""
TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives: enough to read a large checkpoint. torchrun notices by itself when a process ends."""
PREPARE_TIMEOUT = timedelta(hours=12)
"""Timeout while a process prepares data."""
GROUP_COUNTER = count()
"""Counts the process groups that this process has joined; each has its own prefix in the store."""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, and the world size `count`. Without torchrun: rank 0 of 1."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """The rank on this machine."""
    restarted: bool = False
    """Whether torchrun has restarted the processes after a failure."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def device(self, name: str, owner: str = "train") -> torch.device:
        """Returns the device of this process: of several GPUs, its own. `owner` names the caller in errors."""
        if not dist.is_initialized() or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return choose_device(owner, name)
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"{owner}: process {self.local_rank} of this machine has no GPU, as there are {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(self.local_rank)  # First, or every process would create a context on GPU 0.
        return choose_device(owner, f"cuda:{self.local_rank}")

    def wait(self) -> None:
        """Barrier: returns when all processes have called it."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process. Runs on the CPU, without GPU synchronization."""
        return self.maximum(int(flag)) > 0

    def maximum(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """Returns the maximum over all processes."""
        if self.count == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return int(largest)

    def mean(self, x: Tensor) -> Tensor:
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x)
            x /= self.count
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Returns the x of all processes, [processes, ...], by rank."""
        if self.count == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x)
        return torch.stack(parts)

    def run_on_all(self, work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
        """Runs `work` on every process. If it fails on any, all raise the error of the lowest rank that failed."""
        if self.count == 1:
            return work()
        try:
            result = work()
        except Exception as error:
            self._raise_first_error(error, group)
            raise
        self._raise_first_error(None, group)
        return result

    def run_on_first(self, work: Callable[[], Result]) -> Result | None:
        """Runs `work` on rank 0; None on the others. If it raises, all raise."""
        return self.run_on_all(lambda: work() if self.is_main else None)

    def run_first_per_machine(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on one process per machine, then on the others, which find its results in the cache."""
        if self.count == 1:
            return work()
        patient = dist.new_group(backend="gloo", timeout=PREPARE_TIMEOUT)
        firsts = self.run_on_all(lambda: work() if self.local_rank == 0 else None, patient)
        others = self.run_on_all(lambda: work() if self.local_rank > 0 else None, patient)
        dist.destroy_process_group(patient)
        result = firsts if self.local_rank == 0 else others
        assert result is not None
        return result

    def mark_reported(self, error: Failure) -> Failure:
        """Marks an error that all processes raise, so that only rank 0 shows it."""
        if not self.is_main:
            error.add_note(REPORTED)
        return error

    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether an error may come from the end of another process. False for a single process."""
        causes = (error, error.__cause__)
        return self.count > 1 and any(
            isinstance(cause, RuntimeError) and not isinstance(cause, torch.OutOfMemoryError) for cause in causes
        )

    def _raise_first_error(self, error: Exception | None, group: dist.ProcessGroup | None) -> None:
        """Returns if no process has an error. Otherwise all raise the error of the lowest rank that has one."""
        failed_rank = self.count - self.maximum(0 if error is None else self.count - self.rank, group)
        if failed_rank == self.count:
            return
        encoded = b"" if error is None else self._encode_error(error)
        message = torch.zeros(self.maximum(len(encoded) if self.rank == failed_rank else 0), dtype=torch.uint8)
        if self.rank == failed_rank:
            message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        dist.broadcast(message, failed_rank)
        if error is None or self.rank != failed_rank:
            kind, *text = message.tolist()
            error = ERROR_TYPES[kind](bytes(text).decode())
        raise self.mark_reported(error)

    def _encode_error(self, error: Exception) -> bytes:
        """Encodes an error as its type's index in ERROR_TYPES and its text."""
        kind = next((index for index, kind in enumerate(ERROR_TYPES) if isinstance(error, kind)), len(ERROR_TYPES) - 1)
        text = str(error) if isinstance(error, ERROR_TYPES) else repr(error)
        if not self.is_main:
            text = f"process {self.rank}, on {socket.gethostname()}: {text}"
        return bytes([kind]) + text.encode(errors="replace")


SINGLE_RANK = Ranks()


@contextmanager
def join_process_group(device: str) -> Iterator[Ranks]:
    """Joins the process group of torchrun, or an existing group; without torchrun, yields a single rank.

    After an error the group is not destroyed: that would wait for the other processes and hide the error.
    """
    ours = dist.is_available() and not dist.is_initialized() and "RANK" in os.environ
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if ours:
        gpu = device != "cpu" and torch.cuda.is_available()
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps its store across restarts, with the addresses of the old processes, so each attempt has a prefix. On
        # several machines the restart counts differ, so it is left out.
        attempt = restarts if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else 0
        store = dist.PrefixStore(f"longstride {attempt} {next(GROUP_COUNTER)}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    if not in_process_group():
        yield SINGLE_RANK
        return
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    yield replace(ranks, restarted=ranks.any(restarts > 0))
    if ours:
        gc.collect()  # Remaining references to the group would abort the process at exit.
        ranks.wait()  # Other processes may still use the group.
        dist.destroy_process_group()


def in_process_group() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()
