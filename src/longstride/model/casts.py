"""Weights in the precision of activations, converted together at the start of a training step's forward pass.

One by one that is hundreds of short kernels in a deep network. Blocks that keep everything keep these until the backward
pass anyway.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longstride.model.layers import HALF, LAYERS, Linear, has_hooks


class _Casts(threading.local):
    """Those of the forward pass of a thread: another may use another stream, which does not wait for their kernels."""

    def __init__(self) -> None:
        self.by_weight: dict[Tensor, Tensor] = {}


_casts = _Casts()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns weight.to(dtype). One that has been converted before is handed over: only the caller keeps it then."""
    found = None if torch.compiler.is_compiling() else _casts.by_weight.pop(weight, None)
    return weight.to(dtype) if found is None or found.dtype != dtype else found


@contextmanager
def cast_together(blocks: nn.ModuleList, recomputed: Sequence[str], dtype: torch.dtype, fused: bool) -> Iterator[None]:
    """Context of a forward pass, in which `cast` has the weights of these blocks in this dtype already. `fused`: whether
    `residual.py` computes the products of activations, which converts weights one by one."""
    # torch.compile converts them inside other kernels.
    one_by_one = fused and dtype in HALF and not torch.compiler.is_compiling()
    weights = _weights(blocks, recomputed, dtype) if one_by_one else []
    if not weights or torch.is_autocast_enabled(weights[0].device.type):  # Autocast converts them itself.
        yield
        return
    try:
        _casts.by_weight.update(_converted(weights, dtype))
        yield
    finally:
        _casts.by_weight.clear()


@torch.no_grad()
def _converted(weights: list[Tensor], dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """Each has memory of its own, so that it lives no longer than what needs it."""
    casts = [torch.empty_like(x, dtype=dtype) for x in weights]
    torch._foreach_copy_(casts, weights)
    return dict(zip(weights, casts))


def _weights(blocks: nn.ModuleList, recomputed: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
    """Those of another dtype, of blocks that are not compiled, nor recomputed, as these would convert them again. Not shards
    of fsdp, nor the layer inside an adapter. None if there are hooks, which may change weights during the pass."""
    if any(map(has_hooks, blocks.modules())):
        return []
    kept = [block for block, choice in zip(blocks, recomputed) if choice == "off" and block._compiled_call_impl is None]
    named = [one for block in kept for one in block.named_modules()]
    layers = [layer for name, layer in named if type(layer) is Linear and name.rpartition(".")[2] in LAYERS]
    return [x for layer in layers for x in layer.parameters(recurse=False) if type(x) is nn.Parameter and x.dtype != dtype]
