"""The operators of `residual.py`: their definition in plain PyTorch, or the kernels (`residual_kernels.py`) on a GPU.

Each operator has another one that computes its gradients. Functions that end in `_like` return empty tensors of the same
shapes. Where there is nothing to return, an operator returns an empty tensor.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from longstride.attention.implementation import HAS_TRITON
from longstride.model import layers, operators
from longstride.model.dropout import draw_mask
from longstride.model.layers import wide


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _nothing(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _drop(x: Tensor, seed: Tensor | None, keep: float) -> Tensor:
    return x if seed is None else layers.drop(x, draw_mask(x, 1 - keep, seed), 1 / keep)


def _run_kernels(x: Tensor, whole_rows: bool = True) -> bool:
    if not (x.is_cuda and HAS_TRITON):
        return False
    from longstride.model.residual_kernels import takes

    return takes(x, whole_rows)


def _add_norm(
    stream: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, keep: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns stream + dropout(branch + branch_bias), its norm, and mean and scale of each row. The first is empty without a
    branch: then the norm is that of the stream. Without weight and bias it is an RMS norm, and the mean is empty."""
    stream, branch = stream.contiguous(), None if branch is None else branch.contiguous()
    if _run_kernels(stream):
        from longstride.model import residual_kernels

        results = _add_norm_like(stream, branch, branch_bias, weight, bias, seed, keep, epsilon)
        new_stream, mean = None if branch is None else results[0], None if weight is None else results[2]
        outputs = new_stream, results[1], mean, results[3]
        residual_kernels.add_norm(stream, branch, branch_bias, weight, bias, seed, keep, epsilon, outputs)
        return results
    new_stream = stream if branch is None else _add(stream, branch, branch_bias, seed, keep)
    added, x = _nothing(stream) if branch is None else new_stream, wide(new_stream)
    if weight is None:
        scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return added, (x * scale).to(stream.dtype), _nothing(scale), scale.flatten()
    assert bias is not None
    normalized, mean, scale = torch.native_layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), epsilon)
    return added, normalized.to(stream.dtype), mean.flatten(), scale.flatten()


def _add_norm_like(
    stream: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, keep: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    compute_dtype = torch.promote_types(stream.dtype, torch.float32)
    scale = stream.new_empty(stream.shape[:-1].numel(), dtype=compute_dtype)
    mean = _nothing(scale) if weight is None else torch.empty_like(scale)
    new_stream = _nothing(stream) if branch is None else stream.new_empty(stream.shape)
    return new_stream, stream.new_empty(stream.shape), mean, scale


def _add_norm_backward(
    d_stream: Tensor, d_normalized: Tensor, stream: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor,
    seed: Tensor | None, keep: float, sum_branch: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of the stream and of the branch, and the sums over all rows [0 to 3, width] that are those of a
    layer norm's weight and bias, and of the branch's bias if it is wanted. Without a seed the branch's gradient is empty: it
    is the stream's. `stream`: what was normalized."""
    d_stream, d_normalized, stream = (x.contiguous() for x in (d_stream, d_normalized, stream))
    results = _add_norm_backward_like(d_stream, d_normalized, stream, weight, mean, scale, seed, keep, sum_branch)
    if _run_kernels(stream):
        from longstride.model import residual_kernels

        inputs = d_stream, d_normalized, stream, weight, None if weight is None else mean, scale
        d_branch = None if seed is None else results[1]
        residual_kernels.add_norm_backward(*inputs, seed, keep, results[0], d_branch, results[2])
        return results
    x, d_rows = wide(_rows(stream)), wide(_rows(d_normalized))
    normal = (x if weight is None else x - mean[:, None]) * scale[:, None]
    g = d_rows if weight is None else d_rows * weight
    centered = g if weight is None else g - g.mean(-1, keepdim=True)
    dx = scale[:, None] * (centered - normal * (g * normal).mean(-1, keepdim=True))
    d_sum = wide(d_stream) + dx.view(d_stream.shape)
    d_branch = _drop(d_sum, seed, keep)
    sums = [] if weight is None else [(d_rows * normal).sum(0), d_rows.sum(0)]
    sums += [_rows(d_branch).sum(0)] if sum_branch else []
    branch_result = _nothing(d_stream) if seed is None else d_branch.to(d_stream.dtype)
    return d_sum.to(d_stream.dtype), branch_result, torch.stack(sums) if sums else results[2]


def _add_norm_backward_like(
    d_stream: Tensor, d_normalized: Tensor, stream: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor,
    seed: Tensor | None, keep: float, sum_branch: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_branch = _nothing(d_stream) if seed is None else d_stream.new_empty(d_stream.shape)
    sums = scale.new_empty((0 if weight is None else 2) + sum_branch, stream.shape[-1])
    return d_stream.new_empty(d_stream.shape), d_branch, sums


def _add(stream: Tensor, branch: Tensor, branch_bias: Tensor | None, seed: Tensor | None, keep: float) -> Tensor:
    stream, branch = stream.contiguous(), branch.contiguous()
    if _run_kernels(stream):
        from longstride.model import residual_kernels

        result = _add_like(stream, branch, branch_bias, seed, keep)
        residual_kernels.add(stream, branch, branch_bias, seed, keep, result)
        return result
    added = wide(branch) if branch_bias is None else wide(branch) + branch_bias
    return (wide(stream) + _drop(added, seed, keep)).to(stream.dtype)


def _add_like(stream: Tensor, branch: Tensor, branch_bias: Tensor | None, seed: Tensor | None, keep: float) -> Tensor:
    return stream.new_empty(stream.shape)


def _add_backward(d_stream: Tensor, seed: Tensor | None, keep: float) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the branch, empty without a seed, and its sum over all rows [1, width]."""
    d_stream = d_stream.contiguous()
    if _run_kernels(d_stream):
        from longstride.model import residual_kernels

        results = _add_backward_like(d_stream, seed, keep)
        d_branch = None if seed is None else results[0]
        residual_kernels.add_backward(d_stream, seed, keep, d_branch, results[1])
        return results
    dropped = _drop(wide(d_stream), seed, keep)
    d_branch = _nothing(d_stream) if seed is None else dropped.to(d_stream.dtype)
    return d_branch, _rows(dropped).sum(0, keepdim=True)


def _add_backward_like(d_stream: Tensor, seed: Tensor | None, keep: float) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(d_stream.dtype, torch.float32)
    d_branch = _nothing(d_stream) if seed is None else d_stream.new_empty(d_stream.shape)
    return d_branch, d_stream.new_empty(1, d_stream.shape[-1], dtype=compute_dtype)


def _bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    if _run_kernels(x, whole_rows=False):
        from longstride.model import residual_kernels

        result = _bias_gelu_like(x, bias)
        residual_kernels.gelu(x, bias, result)
        return result
    shifted = wide(x) if bias is None else wide(x) + bias
    return (shifted * torch.sigmoid(layers.SLOPE * shifted)).to(x.dtype)


def _bias_gelu_like(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _bias_gelu_backward(d_output: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and its sum over all rows, which is empty without a bias."""
    d_output, x = d_output.contiguous(), x.contiguous()
    if _run_kernels(x, whole_rows=False):
        from longstride.model import residual_kernels

        dx, d_bias = _bias_gelu_backward_like(d_output, x, bias)
        sums = None if bias is None else d_bias
        residual_kernels.gelu_gradient(d_output, x, bias, dx, sums)
        return dx, d_bias
    shifted = wide(x) if bias is None else wide(x) + bias
    dx = layers.gelu_gradient(wide(d_output), shifted)
    return dx.to(x.dtype), dx.new_empty(0) if bias is None else _rows(dx).sum(0)


def _bias_gelu_backward_like(d_output: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(0 if bias is None else x.shape[-1], dtype=compute_dtype)


def _float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x times the transposed weight, in float32 at least."""
    return layers.wide_product(_rows(x), weight.T).view(*x.shape[:-1], weight.shape[0])


def _float32_product_like(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


def _linear_backward(d_output: Tensor, x: Tensor, sum_rows: bool) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a linear layer's weight and bias, in float32 at least; the second is empty if not wanted."""
    d_weight = layers.wide_product(_rows(d_output).T, _rows(x))
    d_bias = _add_backward(d_output, None, 1.0)[1][0] if sum_rows else d_weight.new_empty(0)
    return d_weight, d_bias


def _linear_backward_like(d_output: Tensor, x: Tensor, sum_rows: bool) -> tuple[Tensor, Tensor]:
    outputs = d_output.shape[-1]
    d_weight = x.new_empty(outputs, x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return d_weight, d_weight.new_empty(outputs if sum_rows else 0)


OPS = operators.OPS
for _schema, _compute, _like in (
    (
        "add_norm(Tensor stream, Tensor? branch, Tensor? branch_bias, Tensor? weight, Tensor? bias, Tensor? seed, "
        "float keep, float epsilon) -> (Tensor, Tensor, Tensor, Tensor)", _add_norm, _add_norm_like,
    ),
    (
        "add_norm_backward(Tensor d_stream, Tensor d_normalized, Tensor stream, Tensor? weight, Tensor mean, Tensor scale, "
        "Tensor? seed, float keep, bool sum_branch) -> (Tensor, Tensor, Tensor)",
        _add_norm_backward, _add_norm_backward_like,
    ),
    ("add(Tensor stream, Tensor branch, Tensor? branch_bias, Tensor? seed, float keep) -> Tensor", _add, _add_like),
    ("add_backward(Tensor d_stream, Tensor? seed, float keep) -> (Tensor, Tensor)", _add_backward, _add_backward_like),
    ("bias_gelu(Tensor x, Tensor? bias) -> Tensor", _bias_gelu, _bias_gelu_like),
    (
        "bias_gelu_backward(Tensor d_output, Tensor x, Tensor? bias) -> (Tensor, Tensor)",
        _bias_gelu_backward, _bias_gelu_backward_like,
    ),
    ("float32_product(Tensor x, Tensor weight) -> Tensor", _float32_product, _float32_product_like),
    (
        "linear_backward(Tensor d_output, Tensor x, bool sum_rows) -> (Tensor, Tensor)",
        _linear_backward, _linear_backward_like,
    ),
):  # fmt: skip
    operators.define(_schema, _compute, _like)


@register_flop_formula(OPS.linear_backward)
def _linear_backward_flops(d_output: Any, x: Any, *_: Any, **__: Any) -> int:
    """For PyTorch's flop counter, which does not see the product inside the operator."""
    return int(2 * prod(x) * d_output[-1])


@register_flop_formula(OPS.float32_product)
def _float32_product_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * prod(x) * weight[0])
