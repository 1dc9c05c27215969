"""Linear maps and norms with float32 weights, whatever the activations are.

Norms and gelu keep their input alone for the gradient, and compute the rest again: it is little work, and would be a third
of a block's memory. `feed_forward_again` does so with the whole feed-forward network, some rows at a time, for a model that
recomputes anyway.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 1.702
EPSILON = 1e-5
FEW = 8
"""Rows of a product on a CPU from which on its rounding does not depend on their number."""
PART_BYTES = 2**26
"""Of the inner layer, what `feed_forward_again` computes at a time: enough for products at full speed."""


class Linear(nn.Linear):
    """Computes in the dtype of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        rows = x.numel() // x.shape[-1]
        if rows >= FEW or x.device.type != "cpu" or torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        # A CPU rounds products of few rows in other ways, by their number: a sample would depend on those beside it.
        filled = F.pad(x.reshape(rows, -1), (0, 0, 0, FEW - rows))
        return F.linear(filled, weight, bias)[:rows].view(*x.shape[:-1], -1)


class Norm(nn.LayerNorm):
    """Layer normalization, computed in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        # Without a gradient the plain function: to call it as one that has a gradient takes longer than a short norm.
        normalize = _Normalize.apply if torch.is_grad_enabled() else _Normalize.forward
        return normalize(x, self.weight, self.bias)[0]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide(x)
        result, mean, scale = torch.native_layer_norm(
            x.to(wide), weight.shape, weight.to(wide), bias.to(wide), EPSILON
        )  # fmt: skip
        return result.to(x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wide = _wide(x)
        slopes, wide_x, on_cpu = slopes.to(wide), x.to(wide), x.device.type == "cpu"
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            slopes, wide_x, weight.shape, mean, scale, weight.to(wide), bias.to(wide), [True, not on_cpu, not on_cpu]
        )
        if on_cpu:  # PyTorch adds up the rows of each thread first, so that the bits depend on the number of threads.
            normal = ((wide_x - mean) * scale).mul_(slopes)
            dweight, dbias = (x.reshape(-1, x.shape[-1]).sum(0) for x in (normal, slopes))
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def gelu(x: Tensor) -> Tensor:
    """The paper's form of it: x * sigmoid(1.702 x)."""
    return _Gelu.apply(x) if torch.is_grad_enabled() else _Gelu.forward(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * torch.sigmoid(SLOPE * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Tensor:
        return slopes * _gelu_slopes(*ctx.saved_tensors)


def _gelu_slopes(x: Tensor) -> Tensor:
    gate = torch.sigmoid(SLOPE * x)
    return gate + SLOPE * x * gate * (1 - gate)


def draw_mask(x: Tensor, dropout: float) -> Tensor | None:
    """What of a tensor like x dropout keeps."""
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - dropout) if dropout else None


def drop(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return x if mask is None else x * mask * scale


def feed_forward_again(x: Tensor, inner: Linear, outer: Linear, mask: Tensor | None, scale: float) -> Tensor:
    """drop(outer(gelu(inner(x))), mask, scale), which keeps x and the mask alone.

    Above PART_BYTES of inner layer the gradients of the weights are sums over parts of the rows, and round differently in
    the last bit from those of one product over all rows, as a model without recomputation has them.

    All is kept before any product: a block that is computed again for its gradient ends there. So the gradient belongs to
    the first of two functions, whose result is x, and the second one hands on what it is given.
    """
    weights = inner.weight, inner.bias, outer.weight, outer.bias
    return _FeedForwardValue.apply(_FeedForwardSlopes.apply(x, *weights, mask, scale), *weights, mask, scale)


class _FeedForwardValue(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        w_1, b_1, w_2, b_2 = (weight.to(x.dtype) for weight in (weight_1, bias_1, weight_2, bias_2))
        result = torch.empty_like(x)
        for part in _parts(x, len(w_1)):
            result[part] = drop(F.linear(gelu(F.linear(x[part], w_1, b_1)), w_2, b_2), _at(mask, part), scale)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        return slopes, *[None] * 6


class _FeedForwardSlopes(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *_: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_1, bias_1, weight_2, bias_2, mask = ctx.saved_tensors
        w_1, b_1, w_2 = (weight.to(x.dtype) for weight in (weight_1, bias_1, weight_2))
        dx = torch.empty_like(x)
        sums = [torch.zeros_like(weight) for weight in (weight_1, bias_1, weight_2, bias_2)]
        for part in _parts(x, len(w_1)):
            rows, d_result = x[part].flatten(0, -2), drop(slopes[part], _at(mask, part), ctx.scale).flatten(0, -2)
            inner = F.linear(rows, w_1, b_1)
            d_inner = (d_result @ w_2) * _gelu_slopes(inner)
            dx[part] = (d_inner @ w_1).view_as(x[part])
            for total, added in zip(sums, (d_inner.T @ rows, d_inner.sum(0), d_result.T @ gelu(inner), d_result.sum(0))):
                total += added
        return dx, *sums, None, None


def part_count(inner_bytes: int) -> int:
    """In how many parts the feed-forward network is computed again, by the size of its inner layer for all rows."""
    return max(1, -(-inner_bytes // PART_BYTES))


def _parts(x: Tensor, wide: int) -> list[Any]:
    """Slices of the positions of x [..., n, width], each with about as many rows as are computed together."""
    n = x.shape[-2]
    rows = x.numel() // x.shape[-1]
    step = -(-n // min(n, part_count(rows * wide * x.element_size())))
    return [(..., slice(start, start + step), slice(None)) for start in range(0, n, step)]


def _at(mask: Tensor | None, part: Any) -> Tensor | None:
    return None if mask is None else mask[part]
