"""Several processes that train one model, as torchrun starts them: who is who, and how the model lies on them.

    torchrun --nproc-per-node 8 -m longstride train enwik8 --data enwik8 --out RUN

Each process has its part of every batch. With "ddp" each has the whole model, and gradients are averaged; with "fsdp" each
has a part of every weight, of its gradient and of the optimizer's state, and blocks are put together when they are needed.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longstride.device import choose_device
from longstride.model import SparseTransformer

Result = TypeVar("Result")
FORWARD = "hidden"
"""The method before which weights outside the blocks are put together. They stay so for the logits, until a backward pass:
if the methods that call each other all did this, each would send them once more."""
HOOKS: dict[torch.dtype, Any] = {
    torch.float16: default_hooks.fp16_compress_hook,
    torch.bfloat16: default_hooks.bf16_compress_hook,
}
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
        if self.count > 1:
            self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether any process says so. By the CPU: nothing waits for a GPU."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """The largest that any process has."""
        if self.count == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
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

    def first_on_each_machine(self, work: Callable[[], Result]) -> Result:
        """`work` by one process on each machine, and then, when that has left its results, by the others."""
        if self.local == 0:
            found = work()
            self.wait()
            return found
        self.wait()
        return work()


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Joins the processes that torchrun has started; without it, a process is alone. A group that is there is used."""
    ours = dist.is_available() and not dist.is_initialized() and "RANK" in os.environ
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if ours:
        gpu = device != "cpu" and torch.cuda.is_available()
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps its store when it starts processes anew, and with it the addresses of those before. Machines do not
        # count the same restarts.
        attempt = restarts if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else 0
        store = dist.PrefixStore(f"longstride {attempt} {next(JOINED)}", store)  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size)
    if not dist.is_initialized():
        yield ALONE
        return
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield replace(ranks, restarted=ranks.any(restarts > 0))
    finally:
        if ours:
            gc.collect()  # What still holds on to the group would end the process with an abort.
            dist.destroy_process_group()


class Spread:
    """A model on all processes: its loss, and whether gradients are averaged."""

    def __init__(self, model: SparseTransformer, ranks: Ranks, how: str, averaging: str, rows: int = 1) -> None:
        """`rows`: sequences that a process computes at a time."""
        self.model = model
        device = next(model.parameters()).device
        dtype = averaging_dtype(averaging, model.config.precision, device)
        self.ddp: DistributedDataParallel | None = None
        self.fsdp = how == "fsdp" and ranks.count > 1
        if self.fsdp:
            mesh = init_device_mesh(device.type, (ranks.count,))
            policy = MixedPrecisionPolicy(reduce_dtype=dtype)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            register_fsdp_forward_method(model, FORWARD)
        elif ranks.count > 1:
            ids = None if device.type == "cpu" else [device]
            self.ddp = DistributedDataParallel(_Loss(model), device_ids=ids, gradient_as_bucket_view=True)
            if dtype in HOOKS:
                self.ddp.register_comm_hook(None, HOOKS[dtype])
            # By the first pass gradients get the order in which they are sent, and so sums their rounding: one for nothing,
            # so that the first step of a run that is resumed has the same bits.
            nothing = torch.zeros(rows, model.config.context, dtype=torch.uint8, device=device)
            self.loss(nothing).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(tokens) if self.ddp is None else self.ddp(tokens)
        return loss

    @contextmanager
    def averaged(self, now: bool) -> Iterator[None]:
        """Gradients of passes in this context are averaged over the processes, or kept until such a pass."""
        if self.fsdp:
            self.model.set_requires_gradient_sync(now)  # type: ignore[operator]
        with nullcontext() if now or self.ddp is None else self.ddp.no_sync():
            yield


class _Loss(nn.Module):
    """What DistributedDataParallel calls."""

    def __init__(self, model: SparseTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def averaging_dtype(name: str, precision: str, device: torch.device) -> torch.dtype:
    """What gradients are averaged in. Auto: on GPUs what activations are, if that is a half precision, as the paper does."""
    if name == "auto":
        name = precision if device.type == "cuda" and precision in ("float16", "bfloat16") else "float32"
    if name == "bfloat16" and device.type == "cpu":
        raise ValueError("train: averaging = 'bfloat16' needs GPUs: between CPUs it is not there; use float32 or float16")
    return getattr(torch, name)  # type: ignore[no-any-return]


def whole(x: Tensor) -> Tensor:
    """A weight, put together if it is spread. All processes must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x
