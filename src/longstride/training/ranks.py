"""Several processes that train one model, as torchrun starts them: who is who, and what they tell each other.

    torchrun --nproc-per-node 8 -m longstride train enwik8 --data enwik8 --out RUN

What fails on one of them fails on all: they would wait for it otherwise, and say nothing.
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
KINDS: tuple[type[Exception], ...] = (ValueError, OSError, FloatingPointError, RuntimeError)
"""As what an error of another process is raised: the first that it is, or else the last."""
SAID = "The first process says this, too."
"""The note of an error that others need not show."""
ANSWERS = timedelta(minutes=30)
"""In which a process must, or it counts as lost: enough to read a large checkpoint. One that ends is noticed by torchrun."""
PREPARES = timedelta(hours=12)
"""The same while it makes data ready."""
JOINED = count()
"""How often this process has: each time there is a new group."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Alone it is the first of one."""

    rank: int = 0
    count: int = 1
    local: int = 0
    """The rank on this machine."""
    restarted: bool = False
    """Whether torchrun has started the processes anew, after one was lost."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, name: str, owner: str = "train") -> torch.device:
        """The one that this process uses: of several GPUs its own. `owner` is whom errors name."""
        if not dist.is_initialized() or name not in ("auto", "cuda") or not torch.cuda.is_available():
            return choose_device(owner, name)
        if self.local >= torch.cuda.device_count():
            raise ValueError(
                f"{owner}: process {self.local} of this machine has no GPU, as there are {torch.cuda.device_count()}; "
                f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(self.local)  # Before anything is done there: else all begin with the first one.
        return choose_device(owner, f"cuda:{self.local}")

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether any process says so. By the CPU: nothing waits for a GPU."""
        return self.most(int(flag)) > 0

    def most(self, number: int, group: dist.ProcessGroup | None = None) -> int:
        """The largest that any process has."""
        if self.count == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return int(found)

    def mean(self, x: Tensor) -> Tensor:
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x)
            x /= self.count
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[processes, ...], by rank."""
        if self.count == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x)
        return torch.stack(parts)

    def together(self, work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
        """`work`, in which a process is on its own. If it fails on any, all raise the error of the first of these."""
        if self.count == 1:
            return work()
        try:
            found = work()
        except Exception as error:
            self._agree(error, group)
            raise
        self._agree(None, group)
        return found

    def first_does(self, work: Callable[[], Result]) -> Result | None:
        """`work` by the first process. What it raises, all raise."""
        return self.together(lambda: work() if self.first else None)

    def first_on_each_machine(self, work: Callable[[], Result]) -> Result:
        """`work` by one process on each machine, and then, when that has left its results, by the others."""
        if self.count == 1:
            return work()
        patient = dist.new_group(backend="gloo", timeout=PREPARES)
        firsts = self.together(lambda: work() if self.local == 0 else None, patient)
        others = self.together(lambda: work() if self.local > 0 else None, patient)
        dist.destroy_process_group(patient)
        found = firsts if self.local == 0 else others
        assert found is not None
        return found

    def said(self, error: Failure) -> Failure:
        """An error that all processes raise: but for the first they need not show it."""
        if not self.first:
            error.add_note(SAID)
        return error

    def lost(self, error: BaseException) -> bool:
        """Whether that is what a process sees when others have ended. Who is alone loses nobody."""
        causes = (error, error.__cause__)
        return self.count > 1 and any(
            isinstance(one, RuntimeError) and not isinstance(one, torch.OutOfMemoryError) for one in causes
        )

    def _agree(self, error: Exception | None, group: dist.ProcessGroup | None) -> None:
        """Returns if no process has an error. Else all raise what the first that has one tells them."""
        speaker = self.count - self.most(0 if error is None else self.count - self.rank, group)
        if speaker == self.count:
            return
        told = b"" if error is None else self._told(error)
        message = torch.zeros(self.most(len(told) if self.rank == speaker else 0), dtype=torch.uint8)
        if self.rank == speaker:
            message = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        dist.broadcast(message, speaker)
        if error is None or self.rank != speaker:
            kind, *text = message.tolist()
            error = KINDS[kind](bytes(text).decode())
        raise self.said(error)

    def _told(self, error: Exception) -> bytes:
        """Its kind, and its text."""
        kind = next((number for number, one in enumerate(KINDS) if isinstance(error, one)), len(KINDS) - 1)
        text = str(error) if isinstance(error, KINDS) else repr(error)
        if not self.first:
            text = f"process {self.rank}, on {socket.gethostname()}: {text}"
        return bytes([kind]) + text.encode(errors="replace")


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Joins the processes that torchrun has started; without it, a process is alone. A group that is there is used.

    An error leaves the group: to end it is to wait for processes that may be at work in it, and nobody would see the error.
    """
    ours = dist.is_available() and not dist.is_initialized() and "RANK" in os.environ
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if ours:
        gpu = device != "cpu" and torch.cuda.is_available()
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps its store when it starts processes anew, and with it the addresses of those before. Machines do not
        # count the same restarts.
        attempt = restarts if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else 0
        store = dist.PrefixStore(f"longstride {attempt} {next(JOINED)}", store)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, timeout=ANSWERS, store=store, rank=rank, world_size=size)
    if not is_joined():
        yield ALONE
        return
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    yield replace(ranks, restarted=ranks.any(restarts > 0))
    if ours:
        gc.collect()  # What still holds on to the group would end the process with an abort.
        ranks.wait()  # Nor is a group taken down in which another process may still be at work.
        dist.destroy_process_group()


def is_joined() -> bool:
    """Whether there is a group of processes still."""
    return dist.is_available() and dist.is_initialized()
