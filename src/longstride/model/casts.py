"""Weights in the precision of activations, converted together at the start of a training step's forward pass.

One by one that is hundreds of short kernels in a deep network. Blocks that keep everything keep these until the backward
pass anyway.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longstride.model.layers import HALF, Linear

ALIGNMENT = 128
"""Numbers: each weight begins at a multiple, as if it had memory of its own."""
_casts: dict[int, Tensor] = {}
"""By the `id` of the weight, during a forward pass."""


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns weight.to(dtype)."""
    found = None if torch.compiler.is_compiling() else _casts.get(id(weight))
    return weight.to(dtype) if found is None or found.dtype != dtype else found


@contextmanager
def cast_together(blocks: nn.ModuleList, recomputed: Sequence[str], dtype: torch.dtype, fused: bool) -> Iterator[None]:
    """Context of a forward pass, in which `cast` has the weights of these blocks in this dtype already. `fused`: whether
    `residual.py` computes the products of activations, which converts weights one by one."""
    # torch.compile converts them inside other kernels.
    one_by_one = fused and dtype in HALF and not torch.compiler.is_compiling()
    weights = _weights(blocks, recomputed) if one_by_one else []
    if not weights or torch.is_autocast_enabled(weights[0].device.type):  # Autocast converts them itself.
        yield
        return
    sizes = [-(-x.numel() // ALIGNMENT) * ALIGNMENT for x in weights]
    memory = torch.empty(sum(sizes), dtype=dtype, device=weights[0].device)
    parts = [part[: x.numel()].view_as(x) for part, x in zip(torch.split(memory, sizes), weights)]
    with torch.no_grad():
        torch._foreach_copy_(parts, weights)
    _casts.update(zip(map(id, weights), parts))
    try:
        yield
    finally:
        for x in weights:
            _casts.pop(id(x), None)


def _weights(blocks: nn.ModuleList, recomputed: Sequence[str]) -> list[Tensor]:
    """Those of blocks that are not compiled, nor recomputed, as these would convert them again. Not shards of fsdp."""
    kept = [block for block, choice in zip(blocks, recomputed) if choice == "off" and block._compiled_call_impl is None]
    layers = [layer for block in kept for layer in block.modules() if type(layer) is Linear]
    return [x for layer in layers for x in layer.parameters(recurse=False) if type(x) is nn.Parameter]
