"""The feed-forward network of a block, W_2 gelu(W_1 x + b_1) + b_2, and its gradient.

`recomputed_feed_forward` keeps x, and computes the rest again for the gradient, some rows at a time. Where `product_ops.py`
has kernels, gelu and its slope are computed inside the products (`fused_feed_forward`), also when they are recomputed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstride.model import product_ops
from longstride.model.casts import cast
from longstride.model.layers import Linear, drop, gelu, gelu_gradient
from longstride.model.residual import Product

PART_BYTES = 2**26
"""Bytes of the inner layer that `recomputed_feed_forward` computes at a time: enough for full-speed matrix products."""
ops = product_ops.OPS


def is_fused(device: torch.device, dtype: torch.dtype, inner: Linear) -> bool:
    """Whether gelu is computed inside the products in training, for activations of this dtype on this device."""
    return product_ops.takes(device, dtype, inner.in_features, inner.out_features)


def fused_feed_forward(x: Tensor, inner: Linear, outer: Linear) -> Product:
    """Returns outer(gelu(inner(x))), but for a bias that the next function adds. Where `is_fused`."""
    return Product(_FeedForward.apply(x, inner.weight, inner.bias, outer.weight), outer.bias)


class _FeedForward(torch.autograd.Function):
    """Saves gelu's slope instead of the inner layer, which is as large and takes more work to use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor) -> Tensor:
        w_1, w_2 = cast(weight_1, x.dtype), cast(weight_2, x.dtype)
        activation, slope = ops.product_gelu(x, w_1, bias_1, True)
        ctx.has_bias, ctx.weight_dtype = bias_1 is not None, weight_1.dtype
        ctx.save_for_backward(x, w_1, w_2, activation, slope)
        return F.linear(activation, w_2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, w_1, w_2, activation, slope = ctx.saved_tensors
        d_inner, d_bias = ops.product_gelu_backward(d_output, w_2, slope, ctx.has_bias)
        d_weight_1 = ops.linear_backward(d_inner, x, False)[0].to(ctx.weight_dtype)
        d_weight_2 = ops.linear_backward(d_output, activation, False)[0].to(ctx.weight_dtype)
        return d_inner @ w_1, d_weight_1, d_bias if ctx.has_bias else None, d_weight_2


def feed_forward_in_parts(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    """Returns outer(gelu(inner(x))), some rows at a time: without gradients the inner layer is a block's largest tensor."""
    count = part_count(x.element_size() * x.numel() // x.shape[-1] * inner.out_features)
    if count == 1:
        return outer(gelu(inner(x)))
    return torch.cat([outer(gelu(inner(x[rows]))) for rows in row_parts(x, count)], -2)


def recomputed_feed_forward(
    x: Tensor, inner: Linear, outer: Linear, bias_2: Tensor | None, mask: Tensor | None = None, scale: float = 1.0
) -> Tensor:  # fmt: skip
    """Returns drop(W_2 gelu(inner(x)) + bias_2, mask, scale); saves only x and the mask for the gradient.

    If the inner layer exceeds PART_BYTES, the gradients of the weights are sums over parts of the rows. They differ in the
    last bit from those of a model without recomputation, which takes one product over all rows.

    Activation checkpointing stops recomputing a block once all saved tensors are known. To make it stop before the products,
    the first of two functions returns x and has the gradient; the second computes the value and passes its gradient through.
    """
    weights = inner.weight, inner.bias, outer.weight, bias_2
    settings = mask, scale, is_fused(x.device, x.dtype, inner)
    return _FeedForwardValue.apply(_FeedForwardGradient.apply(x, *weights, *settings), *weights, *settings)


class _FeedForwardValue(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, mask: Tensor | None,
        scale: float, fused: bool,
    ) -> Tensor:  # fmt: skip
        w_1, w_2, b_1, b_2 = *(weight.to(x.dtype) for weight in (weight_1, weight_2)), _cast(bias_1, x), _cast(bias_2, x)
        result = x.new_empty(x.shape)
        for part in _slices(x, w_1):
            rows = _rows(x)[part]
            activation = ops.product_gelu(rows, w_1, bias_1, False)[0] if fused else gelu(F.linear(rows, w_1, b_1))
            if mask is None and b_2 is None:
                _multiply(activation, w_2.T, _rows(result)[part])
            else:
                _rows(result)[part] = drop(
                    F.linear(activation, w_2, b_2), None if mask is None else _rows(mask)[part], scale
                )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        return d_output, *[None] * 7


class _FeedForwardGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *_: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.fused = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_1, bias_1, weight_2, bias_2, mask = ctx.saved_tensors
        w_1, w_2, b_1 = weight_1.to(x.dtype), weight_2.to(x.dtype), _cast(bias_1, x)
        dx, sums = x.new_empty(x.shape), None
        for part in _slices(x, w_1):
            rows, d_result = _rows(x)[part], _rows(d_output)[part]
            d_result = d_result if mask is None else drop(d_result, _rows(mask)[part], ctx.scale)
            if ctx.fused:
                activation, slope = ops.product_gelu(rows, w_1, bias_1, True)
                d_inner, d_bias_1 = ops.product_gelu_backward(d_result, w_2, slope, bias_1 is not None)
                d_weight_1, _ = ops.linear_backward(d_inner, rows, False)
            else:
                inner = F.linear(rows, w_1, b_1)
                activation, d_inner = gelu(inner), gelu_gradient(d_result @ w_2, inner)
                d_weight_1, d_bias_1 = ops.linear_backward(d_inner, rows, bias_1 is not None)
            _multiply(d_inner, w_1, _rows(dx)[part])
            gradients = d_weight_1, d_bias_1, *ops.linear_backward(d_result, activation, bias_2 is not None)
            sums = gradients if sums is None else tuple(total.add_(added) for total, added in zip(sums, gradients))
        assert sums is not None
        of_weights = [
            None if weight is None else total.to(weight.dtype)
            for weight, total in zip((weight_1, bias_1, weight_2, bias_2), sums)
        ]
        return dx, *of_weights, None, None, None


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes x @ weight to `out`."""
    if torch.is_autocast_enabled(x.device.type):  # It may choose another dtype than that of `out`.
        out.copy_(x @ weight)
    else:
        torch.mm(x, weight, out=out)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _slices(x: Tensor, weight: Tensor) -> list[slice]:
    """Returns slices of the rows of x such that the inner layer of each has PART_BYTES."""
    count = x.numel() // x.shape[-1]
    step = -(-count // part_count(count * len(weight) * x.element_size()))
    return [slice(start, start + step) for start in range(0, count, step)]


def _cast(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def part_count(inner_bytes: int) -> int:
    """Returns how many parts the feed-forward network is recomputed in. `inner_bytes`: its inner layer, all rows."""
    return max(1, -(-inner_bytes // PART_BYTES))


def row_parts(x: Tensor, count: int) -> list[Any]:
    """Returns index tuples that slice the positions of x [..., n, width] into at most `count` parts."""
    n = x.shape[-2]
    step = -(-n // min(n, count))
    return [(..., slice(start, start + step), slice(None)) for start in range(0, n, step)]
