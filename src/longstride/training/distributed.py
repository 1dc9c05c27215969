"""Data parallelism. With "ddp" each process has the full model and gradients are averaged; with "fsdp" each has a shard of
every weight, gradient and optimizer state, and the weights of a block are gathered when they are needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from longstride.model import SparseTransformer
from longstride.training.averaging import HOOKS, average_gradients, share_weights
from longstride.training.ranks import Ranks

FORWARD = "hidden"
"""The method before which FSDP gathers the weights outside the blocks. They stay gathered for the logits, until a backward
pass. Only one method is registered: nested ones would each gather them again."""


class ParallelModel:
    """A model under DDP, under FSDP or in one process: its loss, and control of gradient averaging."""

    def __init__(
        self, model: SparseTransformer, device: torch.device, ranks: Ranks, how: str, averaging: torch.dtype, rows: int = 1,
        captured: bool = False,
    ) -> None:  # fmt: skip
        """Moves the model, or this process's shard, to the device. `rows`: sequences per forward pass. `captured`: steps are
        captured, so gradients are averaged by `average` and not in hooks."""
        self.model, self.ranks, self.averaging = model, ranks, averaging
        self.ddp: DistributedDataParallel | None = None
        self.averages_afterwards = captured and ranks.count > 1
        self.fsdp = how == "fsdp" and ranks.count > 1
        if self.fsdp:
            # The model is on the CPU. For each block in turn, then for the rest, fully_shard moves the weights to the device
            # and keeps only the shard: a GPU never holds more than one full block.
            mesh = init_device_mesh(device.type, (ranks.count,))
            policy = MixedPrecisionPolicy(reduce_dtype=averaging)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            register_fsdp_forward_method(model, FORWARD)
            return
        model.to(device)
        if self.averages_afterwards:
            share_weights(model.parameters())
        elif ranks.count > 1:
            ids = None if device.type == "cpu" else [device]
            self.ddp = DistributedDataParallel(_Loss(model), device_ids=ids, gradient_as_bucket_view=True)
            if averaging in HOOKS:
                self.ddp.register_comm_hook(None, HOOKS[averaging])
            # DDP orders its gradient buckets by the first backward pass, and that order affects rounding. A dummy pass makes
            # the first step of a resumed run bit-identical.
            dummy = torch.zeros(rows, model.config.context, dtype=torch.uint8, device=device)
            self.loss(dummy).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(tokens) if self.ddp is None else self.ddp(tokens)
        return loss

    def close(self) -> None:
        """Releases the process group before it is destroyed; the model stays usable.

        Releasing the last reference to a group joins gloo's threads. DistributedDataParallel would do that while it holds
        the GIL, which a gloo thread needs to release a tensor: a deadlock.
        """
        self.ddp = None

    @contextmanager
    def gradient_averaging(self, enabled: bool) -> Iterator[None]:
        """Context for a backward pass. `enabled`: average gradients over the processes; otherwise only accumulate them."""
        if self.fsdp:
            self.model.set_requires_gradient_sync(enabled)  # type: ignore[operator]
        with nullcontext() if enabled or self.ddp is None else self.ddp.no_sync():
            yield

    def average(self) -> None:
        """Averages gradients after the last backward pass of a step, if that has not done it."""
        if self.averages_afterwards:
            average_gradients(self.model.parameters(), self.ranks.count, self.averaging)


class _Loss(nn.Module):
    """The loss as a module, as DistributedDataParallel needs."""

    def __init__(self, model: SparseTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def full_tensor(x: Tensor) -> Tensor:
    """Returns the full tensor of a weight, gathered if it is sharded. Collective: all processes must call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local_tensor(x: Tensor) -> Tensor:
    """Returns this process's shard of a weight; all of it if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the full weights one at a time. Collective: all processes must iterate over all of them."""
    for name, x in model.state_dict().items():
        yield name, full_tensor(x.detach())


@torch.no_grad()
def copy_weight(x: Tensor, source: Tensor, name: str) -> None:
    """Copies a full weight, present on all processes, into x; for a sharded x, this process's shard."""
    if x.shape != source.shape:
        raise ValueError(f"{name} has the shape {list(source.shape)}, and {list(x.shape)} is wanted")
    if isinstance(x, DTensor):
        source = distribute_tensor(source.to(x.device), x.device_mesh, x.placements, src_data_rank=None)
    x.copy_(source)
