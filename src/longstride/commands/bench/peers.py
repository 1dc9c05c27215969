"""Alternatives to `attend`: dense SDPA, SDPA on a reshaped view where the pattern allows it, and FlexAttention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from longstride.patterns import Block, Dilated, Pattern

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(device: torch.device) -> dict[str, Attention]:
    """Causal SDPA: one entry per backend on a GPU, elsewhere PyTorch's choice."""
    if device.type != "cuda":
        return {"SDPA dense": _causal}
    return {
        "SDPA dense": _with_backend(SDPBackend.CUDNN_ATTENTION),
        "SDPA dense flash": _with_backend(SDPBackend.FLASH_ATTENTION),
    }


def on_a_view(pattern: Pattern, n: int) -> Attention | None:
    """SDPA over the sequence as a matrix of l columns, for Column down the columns and for Block along the rows."""
    if isinstance(pattern, Dilated) and pattern.reach is None and pattern.step > 1 and n % pattern.step == 0:
        step = pattern.step

        def down(x: Tensor) -> Tensor:  # [batch, heads, n, d] -> [batch * heads, l, n / l, d]
            return x.reshape(-1, n // step, step, x.shape[-1]).transpose(1, 2)

        def column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(down(q), down(k), down(v)).transpose(1, 2).reshape(v.shape)

        return column
    if isinstance(pattern, Block) and n % pattern.l == 0:
        length = pattern.l

        def along(x: Tensor) -> Tensor:  # [batch, heads, n, d] -> [batch * heads, n / l, l, d]
            return x.reshape(-1, n // length, length, x.shape[-1])

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(along(q), along(k), along(v)).reshape(v.shape)

        return block
    return None


def flex(pattern: Pattern, n: int, device: torch.device) -> Attention:
    """FlexAttention with the pattern as its mask, compiled as its documentation recommends."""
    compiled: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Each pattern and length is compiled separately; the default limit is eight.
        with torch._dynamo.config.patch(recompile_limit=256):
            if not compiled:
                make = torch.compile(create_block_mask)
                mask = make(lambda b, h, i, j: pattern.sees(i, j), None, None, n, n, device=device)
                compiled.extend((torch.compile(flex_attention, dynamic=False), mask))
            output: Tensor = compiled[0](q, k, v, block_mask=compiled[1])
            return output

    return call


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _with_backend(backend: SDPBackend) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _causal(q, k, v)

    return call
