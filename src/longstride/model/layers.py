"""Linear layers, norms and gelu with float32 weights, for activations of any dtype.

Norms and gelu save only their input for the gradient and recompute the rest: that is little work, and saving it would take a
third of a block's memory. `recomputed_feed_forward` does the same for the whole feed-forward network, some rows at a time,
for a model that uses recomputation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 1.702
EPSILON = 1e-5
FEW = 8
"""The least number of rows at which a CPU's matrix product rounds independently of that number."""
PART_BYTES = 2**26
"""Bytes of the inner layer that `recomputed_feed_forward` computes at a time: enough for full-speed matrix products."""


class Linear(nn.Linear):
    """Linear layer that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        rows = x.numel() // x.shape[-1]
        if rows >= FEW or x.device.type != "cpu" or torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        # A CPU rounds products of few rows differently by their number, so a sample would depend on the batch size: pad.
        filled = F.pad(x.reshape(rows, -1), (0, 0, 0, FEW - rows))
        return F.linear(filled, weight, bias)[:rows].view(*x.shape[:-1], -1)


class Norm(nn.LayerNorm):
    """Layer normalization, computed in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        # Function.apply costs more than a short norm, so without gradients call the plain function.
        normalize = _Normalize.apply if torch.is_grad_enabled() else _Normalize.forward
        return normalize(x, self.weight, self.bias)[0]


def rms_norm(x: Tensor) -> Tensor:
    """Divides by the root mean square of the last dimension, which PyTorch computes in float32 at least."""
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


class RootMeanSquareNorm(nn.Module):
    """`rms_norm` as a module. It has no weights."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        compute_dtype = _compute_dtype(x)
        result, mean, scale = torch.native_layer_norm(
            x.to(compute_dtype), weight.shape, weight.to(compute_dtype), bias.to(compute_dtype), EPSILON
        )  # fmt: skip
        return result.to(x.dtype), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        compute_dtype = _compute_dtype(x)
        d_output, x_float, on_cpu = d_output.to(compute_dtype), x.to(compute_dtype), x.device.type == "cpu"
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            d_output,
            x_float,
            weight.shape,
            mean,
            scale,
            weight.to(compute_dtype),
            bias.to(compute_dtype),
            [True, not on_cpu, not on_cpu],
        )
        if on_cpu:  # PyTorch sums the rows per thread, so the result would depend on the number of threads.
            normal = ((x_float - mean) * scale).mul_(d_output)
            dweight, dbias = (x.reshape(-1, x.shape[-1]).sum(0) for x in (normal, d_output))
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def gelu(x: Tensor) -> Tensor:
    """The paper's approximation of GELU: x * sigmoid(1.702 x)."""
    return _Gelu.apply(x) if torch.is_grad_enabled() else _Gelu.forward(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (SLOPE * x).sigmoid_().mul_(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Tensor:
        return gelu_gradient(d_output, *ctx.saved_tensors)


def gelu_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x. gelu(x) = silu(SLOPE x) / SLOPE, and PyTorch has silu's gradient as one operator."""
    dx: Tensor = torch.ops.aten.silu_backward(d_output, SLOPE * x)
    return dx


def drop(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return x if mask is None else x * mask * scale


def recomputed_feed_forward(x: Tensor, inner: Linear, outer: Linear, mask: Tensor | None, scale: float) -> Tensor:
    """Returns drop(outer(gelu(inner(x))), mask, scale); saves only x and the mask for the gradient.

    If the inner layer exceeds PART_BYTES, the gradients of the weights are sums over parts of the rows. They differ in the
    last bit from those of a model without recomputation, which takes one product over all rows.

    Activation checkpointing stops recomputing a block once all saved tensors are known. To make it stop before the products,
    the first of two functions returns x and has the gradient; the second computes the value and passes its gradient through.
    """
    weights = inner.weight, inner.bias, outer.weight, outer.bias
    return _FeedForwardValue.apply(feed_forward_gradient(x, inner, outer, mask, scale), *weights, mask, scale)


def feed_forward_gradient(x: Tensor, inner: Linear, outer: Linear, mask: Tensor | None, scale: float) -> Tensor:
    """Returns x, with the gradient of drop(outer(gelu(inner(x))), mask, scale): for a caller that needs no value."""
    result: Tensor = _FeedForwardGradient.apply(x, inner.weight, inner.bias, outer.weight, outer.bias, mask, scale)
    return result


class _FeedForwardValue(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, bias_2: Tensor | None, mask: Tensor | None,
        scale: float,
    ) -> Tensor:  # fmt: skip
        w_1, w_2, b_1, b_2 = *(weight.to(x.dtype) for weight in (weight_1, weight_2)), _cast(bias_1, x), _cast(bias_2, x)
        result = torch.empty_like(x)
        for part in row_parts(x, len(w_1)):
            result[part] = drop(F.linear(gelu(F.linear(x[part], w_1, b_1)), w_2, b_2), _at(mask, part), scale)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        return d_output, *[None] * 6


class _FeedForwardGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, *_: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_1, bias_1, weight_2, bias_2, mask = ctx.saved_tensors
        w_1, w_2, b_1 = weight_1.to(x.dtype), weight_2.to(x.dtype), _cast(bias_1, x)
        dx = torch.empty_like(x)
        sums = [None if one is None else torch.zeros_like(one) for one in (weight_1, bias_1, weight_2, bias_2)]
        for part in row_parts(x, len(w_1)):
            rows, d_result = x[part].flatten(0, -2), drop(d_output[part], _at(mask, part), ctx.scale).flatten(0, -2)
            inner = F.linear(rows, w_1, b_1)
            d_inner = gelu_gradient(d_result @ w_2, inner)
            dx[part] = (d_inner @ w_1).view_as(x[part])
            for total, added in zip(sums, (d_inner.T @ rows, d_inner.sum(0), d_result.T @ gelu(inner), d_result.sum(0))):
                if total is not None:
                    total += added
        return dx, *sums, None, None


def _cast(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def part_count(inner_bytes: int) -> int:
    """Returns how many parts the feed-forward network is recomputed in. `inner_bytes`: its inner layer, all rows."""
    return max(1, -(-inner_bytes // PART_BYTES))


def row_parts(x: Tensor, inner_width: int) -> list[Any]:
    """Returns index tuples that slice the positions of x [..., n, width] into the parts that are computed together."""
    n = x.shape[-2]
    rows = x.numel() // x.shape[-1]
    step = -(-n // min(n, part_count(rows * inner_width * x.element_size())))
    return [(..., slice(start, start + step), slice(None)) for start in range(0, n, step)]


def _at(mask: Tensor | None, part: Any) -> Tensor | None:
    return None if mask is None else mask[part]
