"""How a model lies on several processes. With "ddp" each has the whole of it, and gradients are averaged; with "fsdp" each
has a part of every weight, of its gradient and of the optimizer's state, and blocks are put together when they are needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from longstride.model import SparseTransformer
from longstride.training.ranks import Ranks

FORWARD = "hidden"
"""The method before which weights outside the blocks are put together. They stay so for the logits, until a backward pass:
if the methods that call each other all did this, each would send them once more."""
HOOKS: dict[torch.dtype, Any] = {
    torch.float16: default_hooks.fp16_compress_hook,
    torch.bfloat16: default_hooks.bf16_compress_hook,
}


class Spread:
    """A model on all processes: its loss, and whether gradients are averaged."""

    def __init__(
        self, model: SparseTransformer, device: torch.device, ranks: Ranks, how: str, averaging: torch.dtype, rows: int = 1
    ) -> None:  # fmt: skip
        """Moves the model to the device, or this process's part of it. `rows`: sequences that it computes at a time."""
        self.model = model
        self.ddp: DistributedDataParallel | None = None
        self.fsdp = how == "fsdp" and ranks.count > 1
        if self.fsdp:
            # The model comes from the CPU. Of each block in turn, then of the rest, PyTorch moves the weights, keeps a part
            # and lets go of the others: a GPU never has more than one block whole.
            mesh = init_device_mesh(device.type, (ranks.count,))
            policy = MixedPrecisionPolicy(reduce_dtype=averaging)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            register_fsdp_forward_method(model, FORWARD)
            return
        model.to(device)
        if ranks.count > 1:
            ids = None if device.type == "cpu" else [device]
            self.ddp = DistributedDataParallel(_Loss(model), device_ids=ids, gradient_as_bucket_view=True)
            if averaging in HOOKS:
                self.ddp.register_comm_hook(None, HOOKS[averaging])
            # By the first pass gradients get the order in which they are sent, and so sums their rounding: one for nothing,
            # so that the first step of a run that is resumed has the same bits.
            nothing = torch.zeros(rows, model.config.context, dtype=torch.uint8, device=device)
            self.loss(nothing).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(tokens) if self.ddp is None else self.ddp(tokens)
        return loss

    def close(self) -> None:
        """Lets go of the group of processes, before it ends; the model stays.

        Whoever holds the last reference to a group joins the threads of gloo. DistributedDataParallel would do so with
        Python's lock held, and a thread that is about to release a tensor waits for that lock: neither would ever go on.
        """
        self.ddp = None

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
        raise ValueError("train: averaging = 'bfloat16' needs GPUs: between CPUs it is not there; use float32")
    if name == "float16" and precision != "float16":
        other = "float32" if device.type == "cpu" else "float32 or bfloat16"
        raise ValueError(
            "train: averaging = 'float16' needs --model.precision float16, which scales the loss: else small gradients are "
            f"0; use {other}"
        )
    return getattr(torch, name)  # type: ignore[no-any-return]


def whole(x: Tensor) -> Tensor:
    """A weight, put together if it is spread. All processes must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each in turn, so that two at most are there. All processes must go through all of them."""
    for name, x in model.state_dict().items():
        yield name, whole(x.detach())


@torch.no_grad()
def fill(x: Tensor, source: Tensor, name: str) -> None:
    """Copies a whole weight, which all processes have, or this process's part of it."""
    if x.shape != source.shape:
        raise ValueError(f"{name} has the shape {list(source.shape)}, and {list(x.shape)} is wanted")
    if isinstance(x, DTensor):
        source = distribute_tensor(source.to(x.device), x.device_mesh, x.placements, src_data_rank=None)
    x.copy_(source)
