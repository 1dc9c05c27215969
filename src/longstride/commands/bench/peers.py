"""PyTorch's alternatives to `attend`: SDPA (dense, or on a view of the sequence), varlen_attn and FlexAttention."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from longstride.commands.bench.measure import Context
from longstride.patterns import Block, Dense, Dilated, Pattern

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

SDPA_DENSE, VARLEN, FLEX, FLEX_FLASH = "SDPA dense", "varlen", "Flex", "Flex FLASH"
PEERS = ("SDPA", VARLEN, FLEX)
"""How the names of all peers begin."""


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Contender:
    """One way to compute a pattern."""

    name: str
    pattern: Pattern
    call: Attention
    ours: bool = False
    differentiable: bool = True
    compiled: bool = False
    """Whether it is also measured under torch.compile, where that is asked for."""
    within: Context = nullcontext
    """A context that its calls need, which is not timed."""
    arrange: Callable[[Tensor], Tensor] = _unchanged
    """Makes its layout of [batch, heads, n, d]; not timed, since a user would hold tensors in that layout."""


def missing(device: torch.device) -> dict[str, str]:
    """Peers that cannot run here at all, each with the reason."""
    if device.type != "cuda":
        return dict.fromkeys((VARLEN, FLEX_FLASH), "it runs on CUDA devices only")
    reasons = {}
    if not find_spec("torch.nn.attention.varlen") or "window_size" not in signature(_varlen_attn()).parameters:
        reasons[VARLEN] = f"torch {torch.__version__} has no varlen_attn with a window_size"
    if "BACKEND" not in getattr(getattr(flex_attention, "FlexKernelOptions", None), "__annotations__", {}):
        reasons[FLEX_FLASH] = f"FlexAttention of torch {torch.__version__} has no other backends"
    elif not (find_spec("flash_attn") and find_spec("flash_attn.cute")):
        reasons[FLEX_FLASH] = "its backend, the package flash-attn-4 (flash_attn.cute), is not installed"
    return reasons


def dense(device: torch.device) -> list[Contender]:
    """SDPA, causal: by backend on a GPU, where they differ, or else as PyTorch chooses."""
    if device.type != "cuda":
        return [Contender(SDPA_DENSE, Dense(), _causal, compiled=True)]
    return [
        Contender(SDPA_DENSE, Dense(), _causal, compiled=True, within=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        Contender(f"{SDPA_DENSE} flash", Dense(), _causal, within=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    ]


def on_a_view(text: str, pattern: Pattern, n: int) -> Contender | None:
    """SDPA over the sequence as a matrix of l columns, for Column down the columns and for Block along the rows."""
    if isinstance(pattern, Dilated) and pattern.reach is None and pattern.step > 1 and n % pattern.step == 0:
        step = pattern.step

        def down(x: Tensor) -> Tensor:  # [batch, heads, n, d] -> [batch * heads, l, n / l, d]
            return x.reshape(-1, n // step, step, x.shape[-1]).transpose(1, 2)

        def column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(down(q), down(k), down(v)).transpose(1, 2).reshape(v.shape)

        return Contender(f"SDPA view {text}", pattern, column)
    if isinstance(pattern, Block) and n % pattern.l == 0:
        length = pattern.l

        def along(x: Tensor) -> Tensor:  # [batch, heads, n, d] -> [batch * heads, n / l, l, d]
            return x.reshape(-1, n // length, length, x.shape[-1])

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _causal(along(q), along(k), along(v)).reshape(v.shape)

        return Contender(f"SDPA view {text}", pattern, block)
    return None


def varlen(text: str, pattern: Pattern, batch: int, n: int, device: torch.device) -> Contender | None:
    """torch's varlen_attn: for Local with a window over each sequence, for Block with each block as a sequence."""
    if isinstance(pattern, Dilated) and pattern.step == 1 and pattern.reach is not None:
        length, window = n, (pattern.reach, 0)
    elif isinstance(pattern, Block):
        length, window = min(pattern.l, n), (-1, 0)
    else:
        return None
    attention = _varlen_attn()
    starts = [sequence * n + start for sequence in range(batch) for start in range(0, n, length)]
    ends = torch.tensor([*starts, batch * n], dtype=torch.int32, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = attention(q, k, v, ends, ends, length, length, window_size=window)
        return output

    def packed(x: Tensor) -> Tensor:  # [batch, heads, n, d] -> [batch * n, heads, d]
        return x.transpose(1, 2).flatten(0, 1).contiguous()

    return Contender(f"{VARLEN} {text}", pattern, call, arrange=packed)


def flex(text: str, pattern: Pattern, n: int, device: torch.device, backend: str | None = None) -> Contender:
    """FlexAttention with the pattern as its mask, compiled, as its documentation tells users to call it. `backend`: of its
    kernels, "FLASH" for those of FlashAttention 4; left out, Triton's."""
    compiled: list[Any] = []
    options = {} if backend is None else {"kernel_options": {"BACKEND": backend}}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not compiled:
            make = torch.compile(flex_attention.create_block_mask)
            mask = make(lambda b, h, i, j: pattern.sees(i, j), None, None, n, n, device=device)
            compiled.extend((torch.compile(flex_attention.flex_attention, dynamic=False), mask))
        output: Tensor = compiled[0](q, k, v, block_mask=compiled[1], **options)
        return output

    def within() -> Any:  # Each pattern and length is compiled for itself; the default stops that after eight.
        return torch._dynamo.config.patch(recompile_limit=256)

    name = f"{FLEX} {text}" if backend is None else f"{FLEX} {backend} {text}"
    # It has no backward on a CPU.
    return Contender(name, pattern, call, differentiable=device.type != "cpu", within=within)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _varlen_attn() -> Any:
    from torch.nn.attention import varlen  # Since torch 2.10.

    return varlen.varlen_attn
