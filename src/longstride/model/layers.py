"""Linear layers, norms and gelu with float32 weights, for activations of any dtype.

Norms and gelu save only their input for the gradient and recompute the rest: that is little work, and saving it would take a
third of a block's memory.

Their forward passes call nothing that works in place, and return nothing from a `to` that may return its input:
torch.compile of PyTorch 2.11 loses the gradients of such results (pytorch/pytorch#180642). They have the numbers SLOPE and
EPSILON written out: torch.compile(dynamic=True) makes a global number symbolic, and fails where two layers read it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)
SLOPE = 1.702
EPSILON = 1e-5
QK_FACTOR = 3.0
"""Normalised queries and keys have a root mean square of 1. This factor makes their softmax sharp enough to begin with."""
LAYERS = frozenset({"query_key_value", "project", "inner", "outer", "output", "norm_attention", "norm_ff", "norm"})
"""Names of the linear layers and norms in a network."""
FEW = 8
"""The least number of rows at which a CPU's matrix product rounds independently of that number."""


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


def has_hooks(module: nn.Module) -> bool:
    """Whether something besides the forward of its class runs when a module is called: hooks, or a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_plain(*layers: nn.Module) -> bool:
    """Whether the layers compute what their weights say, so that a kernel may take the weights and leave the call out.

    Not with hooks, nor where another module has taken a layer's place, such as one with an adapter.
    """
    return all(type(layer) in (Linear, Norm, RootMeanSquareNorm) and not has_hooks(layer) for layer in layers)


def check_plain(owner: str, network: nn.Module, fix: str) -> None:
    """Refuses a network, or a block, that computes something else than its weights say, for code that reads only them."""
    for name, module in network.named_modules():
        if has_hooks(module):
            what = f"{name or 'the network'} has hooks or a forward of its own, which would not run"
            raise ValueError(f"{owner}: {what}; remove them, or {fix}")
        is_foreign = bool(name) and not type(module).__module__.startswith(("longstride.", "torch."))
        is_layer = name.rpartition(".")[2] in LAYERS
        if is_foreign or (is_layer and type(module) not in (Linear, Norm, RootMeanSquareNorm)):
            raise ValueError(f"{owner}: {name} is of type {type(module).__name__}, not a part of the network itself; {fix}")


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

    weight, bias, eps = None, None, EPSILON

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        compute_dtype = _compute_dtype(x)
        result, mean, scale = torch.native_layer_norm(
            x.to(compute_dtype), weight.shape, weight.to(compute_dtype), bias.to(compute_dtype), 1e-5
        )  # fmt: skip
        return result if x.dtype == compute_dtype else result.to(x.dtype), mean, scale

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


def wide(x: Tensor) -> Tensor:
    """Returns x in float32 at least."""
    return x.to(_compute_dtype(x))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, summed and returned in float32 at least."""
    if a.is_cuda and a.dtype in HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)


def gelu(x: Tensor) -> Tensor:
    """The paper's approximation of GELU: x * sigmoid(1.702 x)."""
    return _Gelu.apply(x) if torch.is_grad_enabled() else _Gelu.forward(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Tensor:
        return gelu_gradient(d_output, *ctx.saved_tensors)


def gelu_gradient(d_output: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x. gelu(x) = silu(SLOPE x) / SLOPE, and PyTorch has silu's gradient as one operator."""
    dx: Tensor = torch.ops.aten.silu_backward(d_output, 1.702 * x)
    return dx


def drop(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return x if mask is None else x * mask * scale
