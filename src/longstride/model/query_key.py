"""Queries and keys before attention: normalised and rotated, if the network's config says so.

    q, k = normalize_and_rotate(q, k, rotation, query_scale)                   [batch, heads, n, d]
    packed = normalize_and_rotate_packed(packed, ...)    [batch, n, q | k | v], as one projection makes them

The first is the definition. The second is one kernel forward and one backward on a GPU in training
(`query_key_kernels.py`), where the definition would be a dozen passes over memory. torch.compile joins those by itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstride.attention.implementation import HAS_TRITON
from longstride.model import operators, residual
from longstride.model.layers import EPSILON, QK_FACTOR, rms_norm, wide
from longstride.model.rotary import rotate

MOST_COLUMNS = 256
"""The widest head of the kernels."""
ops = operators.OPS


def normalize_and_rotate(
    q: Tensor, k: Tensor, rotation: Tensor | None, query_scale: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """rotation: from `rotary.rotation`. query_scale: a learned factor for each head [heads]; without it nothing is
    normalised."""
    if query_scale is not None:
        q = rms_norm(q) * (QK_FACTOR * query_scale)[:, None, None]
        k = rms_norm(k)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k


def is_fused(packed: Tensor, d_qk: int) -> bool:
    """Whether the kernels take a packed tensor. They read values as heads of d_qk columns, too."""
    fits = packed.shape[-1] % d_qk == 0 and d_qk % 2 == 0 and d_qk <= MOST_COLUMNS and packed.numel() > 0
    plain = not (torch.compiler.is_compiling() or torch.is_autocast_enabled(packed.device.type))
    return fits and plain and residual.is_fused(packed)


def normalize_and_rotate_packed(
    packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int
) -> Tensor:
    """Returns `packed` with queries and keys normalised and rotated. Only where `is_fused`."""
    return _NormalizeAndRotate.apply(packed, rotation, query_scale, d_qk, heads)


class _NormalizeAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int) -> Tensor:
        return ops.normalize_and_rotate(packed, rotation, query_scale, d_qk, heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        packed, rotation, query_scale, ctx.d_qk, ctx.heads = inputs
        # The gradient of a rotation alone needs no values.
        ctx.save_for_backward(None if query_scale is None else packed, rotation, query_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        packed, rotation, query_scale = ctx.saved_tensors
        packed = d_output if packed is None else packed  # For its shape.
        d_packed, d_scale = ops.normalize_and_rotate_backward(
            d_output, packed, rotation, query_scale, ctx.d_qk, ctx.heads
        )  # fmt: skip
        return d_packed, None, None if query_scale is None else d_scale.to(query_scale.dtype), None, None


def _run_kernels(packed: Tensor) -> bool:
    return packed.is_cuda and HAS_TRITON and packed.dtype in residual.DTYPES


def _forward(packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int) -> Tensor:
    if _run_kernels(packed):
        from longstride.model import query_key_kernels

        result = torch.empty_like(packed, memory_format=torch.contiguous_format)
        query_key_kernels.forward(packed, rotation, query_scale, result, d_qk, heads)
        return result
    width = heads * d_qk
    q, k = (x.unflatten(-1, (heads, d_qk)).transpose(1, 2) for x in packed[..., : 2 * width].split(width, -1))
    q, k = (x.transpose(1, 2).flatten(2) for x in normalize_and_rotate(q, k, rotation, query_scale))
    return torch.cat((q.to(packed.dtype), k.to(packed.dtype), packed[..., 2 * width :]), -1)


def _forward_like(packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int) -> Tensor:
    return packed.new_empty(packed.shape)


def _backward(
    d_output: Tensor, packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the packed tensor and of the scale, which is empty if there is none.

    With r = 1 / root mean square of x, y = r x and g = factor d_y: d_x = r (g - y average(g y))."""
    if _run_kernels(packed):
        from longstride.model import query_key_kernels

        results = _backward_like(d_output, packed, rotation, query_scale, d_qk, heads)
        inputs = d_output, packed, rotation, query_scale
        query_key_kernels.backward(*inputs, results[0], None if query_scale is None else results[1], d_qk, heads)
        return results
    width = 2 * heads * d_qk
    x, d = (wide(one[..., :width]).unflatten(-1, (2 * heads, d_qk)) for one in (packed, d_output))
    d_scale = wide(x.new_empty(0))
    if rotation is not None:
        cos, sin = rotation[:, :, None]  # [n, 1, d_qk / 2]
        first, second = d.chunk(2, -1)
        d = torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
    if query_scale is not None:
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        y = x * r
        d_scale = QK_FACTOR * (d * y).sum((0, 1, 3))[:heads]
        g = d * torch.cat((QK_FACTOR * query_scale, torch.ones_like(query_scale)))[:, None]
        d = r * (g - y * (g * y).mean(-1, keepdim=True))
    return torch.cat((d.flatten(2).to(packed.dtype), d_output[..., width:]), -1), d_scale


def _backward_like(
    d_output: Tensor, packed: Tensor, rotation: Tensor | None, query_scale: Tensor | None, d_qk: int, heads: int
) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(packed.dtype, torch.float32)
    d_scale = packed.new_empty(0 if query_scale is None else heads, dtype=compute_dtype)
    return packed.new_empty(packed.shape), d_scale


operators.define(
    "normalize_and_rotate(Tensor packed, Tensor? rotation, Tensor? query_scale, int d_qk, int heads) -> Tensor",
    _forward, _forward_like,
)  # fmt: skip
operators.define(
    "normalize_and_rotate_backward(Tensor d_output, Tensor packed, Tensor? rotation, Tensor? query_scale, int d_qk, "
    "int heads) -> (Tensor, Tensor)",
    _backward, _backward_like,
)  # fmt: skip
