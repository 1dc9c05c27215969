"""Averages of gradients over processes: their dtype, DDP's hooks for it, and what captured steps have instead.

PyTorch's DistributedDataParallel averages gradients in hooks, while the backward pass goes on. A step that is captured as a
CUDA graph has no hooks: `average_gradients` comes after the backward pass.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

HOOKS: dict[torch.dtype, Any] = {
    torch.float16: default_hooks.fp16_compress_hook,
    torch.bfloat16: default_hooks.bf16_compress_hook,
}
BUCKET_BYTES = 2**26
"""Of one all-reduce in `average_gradients`."""


def averaging_dtype(name: str, precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of gradient averaging. "auto": on GPUs the half precision of activations, otherwise float32."""
    if name == "auto":
        name = precision if device.type == "cuda" and precision in ("float16", "bfloat16") else "float32"
    if name == "bfloat16" and device.type == "cpu":
        raise ValueError("train: averaging = 'bfloat16' needs GPUs: CPUs cannot average in it; use float32")
    if name == "float16" and precision != "float16":
        other = "float32" if device.type == "cpu" else "float32 or bfloat16"
        raise ValueError(
            "train: averaging = 'float16' needs --model.precision float16, which scales the loss: else small gradients are "
            f"0; use {other}"
        )
    return getattr(torch, name)  # type: ignore[no-any-return]


@torch.no_grad()
def share_weights(parameters: Iterable[Tensor]) -> None:
    """Gives every process the weights of the first, as DDP does: another kind of processor draws others. Collective."""
    for x in parameters:
        dist.broadcast(x, 0)


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], count: int, dtype: torch.dtype) -> None:
    """Replaces gradients by their means over `count` processes, in this dtype, as DDP does. Collective."""
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in (x.grad for x in parameters if x.grad is not None):
        room -= gradient.numel() * dtype.itemsize
        if room < 0 or not buckets:
            buckets.append([])
            room = BUCKET_BYTES - gradient.numel() * dtype.itemsize
        buckets[-1].append(gradient)
    for bucket in buckets:
        flat = torch.empty(sum(x.numel() for x in bucket), dtype=dtype, device=bucket[0].device)
        parts = [part.view_as(x) for part, x in zip(torch.split(flat, [x.numel() for x in bucket]), bucket)]
        torch._foreach_copy_(parts, bucket)
        dist.all_reduce(flat.div_(count))
        torch._foreach_copy_(bucket, parts)
