"""Operators of the feed-forward network: matrix products with gelu, or its slope, in their epilogue.

    gelu, slope = product_gelu(x, weight, bias, True)             gelu(z) and gelu'(z) of z = x weight^T + bias
    d_z, d_bias = product_gelu_backward(d, weight, slope, True)   (d weight) * gelu'(z), and its sum over all rows

`takes` says where they have kernels (`product_kernels.py`). Elsewhere they are computed in plain PyTorch. Functions that end
in `_like` return empty tensors of the same shapes. Where there is nothing to return, an operator returns an empty tensor.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longstride.attention.implementation import HAS_TRITON
from longstride.attention.kernels.hopper.choice import is_hopper
from longstride.model import layers, operators

DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = range(64, 513, 64)
"""Of x; beyond them the weights of a program do not fit into shared memory."""
INNER = 128
"""The inner layer's width is a multiple of this."""


def takes(device: torch.device, dtype: torch.dtype, width: int, inner_width: int) -> bool:
    """Whether kernels compute the products of activations [..., width] with an inner layer of this width."""
    fits = width in WIDTHS and inner_width % INNER == 0 and dtype in DTYPES
    return fits and device.type == "cuda" and HAS_TRITON and _on_hopper(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _on_hopper(device: torch.device) -> bool:
    return is_hopper(device)


def _product_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, need_slope: bool) -> tuple[Tensor, Tensor]:
    if x.numel() and takes(x.device, x.dtype, x.shape[-1], len(weight)):
        from longstride.model import product_kernels

        results = _product_gelu_like(x, weight, bias, need_slope)
        product_kernels.product_gelu(x, weight, bias, results[0], results[1] if need_slope else None)
        return results
    z = layers.wide(x @ weight.T)
    z = z if bias is None else z + bias
    slope = layers.gelu_gradient(torch.ones_like(z), z).to(x.dtype) if need_slope else x.new_empty(0)
    return (z * torch.sigmoid(layers.SLOPE * z)).to(x.dtype), slope


def _product_gelu_like(x: Tensor, weight: Tensor, bias: Tensor | None, need_slope: bool) -> tuple[Tensor, Tensor]:
    shape = *x.shape[:-1], len(weight)
    return x.new_empty(shape), x.new_empty(shape if need_slope else 0)


def _product_gelu_backward(d_output: Tensor, weight: Tensor, slope: Tensor, sum_rows: bool) -> tuple[Tensor, Tensor]:
    if d_output.numel() and takes(d_output.device, d_output.dtype, *weight.shape):
        from longstride.model import product_kernels

        results = _product_gelu_backward_like(d_output, weight, slope, sum_rows)
        product_kernels.product_gelu_backward(d_output, weight, slope, results[0], results[1] if sum_rows else None)
        return results
    d_z = layers.wide(d_output @ weight) * slope
    sums = d_z.reshape(-1, d_z.shape[-1]).sum(0) if sum_rows else layers.wide(d_z.new_empty(0))
    return d_z.to(slope.dtype), sums


def _product_gelu_backward_like(d_output: Tensor, weight: Tensor, slope: Tensor, sum_rows: bool) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(slope.dtype, torch.float32)
    return slope.new_empty(slope.shape), slope.new_empty(slope.shape[-1] if sum_rows else 0, dtype=compute_dtype)


OPS = operators.OPS
operators.define(
    "product_gelu(Tensor x, Tensor weight, Tensor? bias, bool need_slope) -> (Tensor, Tensor)",
    _product_gelu, _product_gelu_like,
)  # fmt: skip
operators.define(
    "product_gelu_backward(Tensor d_output, Tensor weight, Tensor slope, bool sum_rows) -> (Tensor, Tensor)",
    _product_gelu_backward, _product_gelu_backward_like,
)  # fmt: skip


@register_flop_formula(OPS.product_gelu)
def _product_gelu_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """For PyTorch's flop counter, which does not see the product inside the operator."""
    return int(2 * prod(x) * weight[0])


@register_flop_formula(OPS.product_gelu_backward)
def _product_gelu_backward_flops(d_output: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(d_output) * weight[1])
