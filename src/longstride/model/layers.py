"""Linear maps and norms with float32 weights, whatever the activations are.

Norms and gelu keep their input alone for the gradient, and compute the rest again: it is little work, and would be a third
of a block's memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 1.702
EPSILON = 1e-5


class Linear(nn.Linear):
    """Computes in the dtype of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    """Layer normalization, computed in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x, self.weight, self.bias)[0]


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
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            slopes.to(wide), x.to(wide), weight.shape, mean, scale, weight.to(wide), bias.to(wide), [True] * 3
        )
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def gelu(x: Tensor) -> Tensor:
    """The paper's form of it: x * sigmoid(1.702 x)."""
    return _Gelu.apply(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * torch.sigmoid(SLOPE * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(SLOPE * x)
        return slopes * (gate + SLOPE * x * gate * (1 - gate))
