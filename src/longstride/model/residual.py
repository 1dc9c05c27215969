"""The residual stream between matrix products: additions with bias and dropout, norms, and gelu with its bias.

    h, x = normalize(h, norm)                        x = norm(h)
    h, x = add_and_normalize(h, branch, norm)        h = h + dropout(branch + bias),  x = norm(h)
    h = add(h, branch)                               h = h + dropout(branch + bias)
    x = gelu(product)                                x = gelu(product + bias)
    x = linear(x, layer)                             x = layer(x), with float32 gradients of its weight and bias
    x = logits(h, norm, layer)                       x = layer(norm(h)) in float32

These only move memory. On a GPU, in training, each is one kernel forward and one backward (`residual_kernels.py`): the
gradient of the stream, the sums over all rows that are the gradients of biases and norms, and the dropout mask, drawn again
from its seed, come from one pass. A matrix product leaves its bias to the function that follows (`Product`), whose backward
sums the bias's gradient. `residual_ops.py` has the operators.

Elsewhere, and without gradients, the functions above are written out with the modules of `layers.py`. So are RMS norms and
gelu without bias under torch.compile, which joins them with the operations around them, and additions that have neither
bias nor dropout nor norm.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longstride.attention.implementation import HAS_TRITON
from longstride.model import layers, residual_ops
from longstride.model.casts import cast
from longstride.model.dropout import draw_mask
from longstride.model.layers import has_hooks, is_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ops = residual_ops.OPS


class Product(NamedTuple):
    """The output of a linear layer."""

    value: Tensor
    bias: Tensor | None
    """Still to be added to the value."""


class Dropout(NamedTuple):
    rate: float
    seed: Tensor

    @property
    def keep(self) -> float:
        return 1 - self.rate


class Branch(NamedTuple):
    """What a block still has to add to the stream: the next block adds it in the kernel of its first norm."""

    product: Product
    dropout: Dropout | None


def is_fused(x: Tensor) -> bool:
    """Whether activations like x are computed by the kernels."""
    return x.is_cuda and HAS_TRITON and x.dtype in DTYPES and torch.is_grad_enabled()


def _takes_norm(h: Tensor, norm: nn.Module) -> bool:
    """Whether a norm is computed here, and not by its module. torch.compile joins an RMS norm with what is around it."""
    return is_fused(h) and is_plain(norm) and not (norm.weight is None and torch.compiler.is_compiling())


def _takes(x: Tensor, layer: nn.Module) -> bool:
    """Whether a layer's product is computed here. Autocast chooses the dtypes of both passes itself."""
    return is_fused(x) and is_plain(layer) and not torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, layer: layers.Linear) -> Tensor:
    """Applies a linear layer, or what has taken its place."""
    if not _takes(x, layer):
        return layer(x)
    return _Linear.apply(x, layer.weight, layer.bias)


def product(x: Tensor, layer: layers.Linear) -> Product:
    """Applies a linear layer, but for a bias that the next function can add."""
    if not _takes(x, layer) or layer.bias is None:
        return Product(linear(x, layer), None)
    return Product(_Linear.apply(x, layer.weight, None), layer.bias)


def logits(h: Tensor, norm: nn.Module, layer: layers.Linear) -> Tensor:
    """Returns norm(h) times the layer's weight, in float32 at least.

    In training with half precision the product's inputs are rounded to it, as everywhere in the network. Without gradients
    they are float32. A layer that another module has taken the place of, such as one with an adapter, is called as it is.
    """
    plain = is_plain(layer) and layer.bias is None and not has_hooks(norm)
    if plain and is_fused(h) and h.dtype in layers.HALF and not torch.is_autocast_enabled(h.device.type):
        return _Float32Product.apply(normalize(h, norm)[1], layer.weight)
    return layer(norm(layers.wide(h)))


def normalize(h: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns h and norm(h). Go on with the h that is returned: its gradient joins the norm's."""
    if not _takes_norm(h, norm):
        return h, norm(h)
    return _AddNorm.apply(h, None, None, norm.weight, norm.bias, None, 1.0, norm.eps)[:2]


def add_and_normalize(
    h: Tensor, branch: Product, norm: nn.Module, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns h + dropout(branch), and its norm."""
    if not _takes_norm(h, norm):
        h = add(h, branch, dropout)
        return h, norm(h)
    seed, keep = (None, 1.0) if dropout is None else (dropout.seed, dropout.keep)
    return _AddNorm.apply(h, *branch, norm.weight, norm.bias, seed, keep, norm.eps)[:2]


def add(h: Tensor, branch: Product, dropout: Dropout | None = None) -> Tensor:
    """Returns h + dropout(branch)."""
    if is_fused(h) and not (branch.bias is None and dropout is None):
        seed, keep = (None, 1.0) if dropout is None else (dropout.seed, dropout.keep)
        return _Add.apply(h, *branch, seed, keep)
    assert branch.bias is None
    if dropout is None:
        return h + branch.value
    return h + layers.drop(branch.value, draw_mask(branch.value, dropout.rate, dropout.seed), 1 / dropout.keep)


def gelu(x: Product) -> Tensor:
    """The paper's approximation of GELU."""
    if x.bias is None and (torch.compiler.is_compiling() or not is_fused(x.value)):
        return layers.gelu(x.value)
    return _BiasGelu.apply(*x)


class _Linear(torch.autograd.Function):
    """F.linear. The weight's gradient is a product with a float32 result, and the bias's comes from one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        converted = cast(weight, x.dtype)
        ctx.save_for_backward(x, converted)
        ctx.weight_dtype, ctx.has_bias = weight.dtype, bias is not None
        return nn.functional.linear(x, converted, None if bias is None else cast(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_weight, d_bias = ops.linear_backward(d_output, x, ctx.has_bias)
        return d_output @ weight, d_weight.to(ctx.weight_dtype), d_bias if ctx.has_bias else None


class _Float32Product(torch.autograd.Function):
    """A linear layer without bias whose result is float32. Its gradient is rounded to the dtype of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        converted = weight.to(x.dtype)
        ctx.save_for_backward(x, converted)
        ctx.weight_dtype = weight.dtype
        return ops.float32_product(x, converted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_output = d_output.to(x.dtype)
        return d_output @ weight, ops.linear_backward(d_output, x, False)[0].to(ctx.weight_dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        h: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        seed: Tensor | None, keep: float, epsilon: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        stream, *others = ops.add_norm(h, branch, branch_bias, weight, bias, seed, keep, epsilon)
        return h.view_as(h) if branch is None else stream, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        h, branch, branch_bias, weight, _, seed, ctx.keep, _ = inputs
        stream, _, mean, scale = output
        ctx.has_branch, ctx.has_bias = branch is not None, branch_bias is not None
        ctx.save_for_backward(stream if ctx.has_branch else h, weight, mean, scale, seed)
        ctx.mark_non_differentiable(mean, scale)
        if not torch.compiler.is_compiling():  # Otherwise autograd fills gradients of mean and scale with zeros.
            ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor | None, d_normalized: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        stream, weight, mean, scale, seed = ctx.saved_tensors
        d_stream, d_normalized = (torch.zeros_like(stream) if d is None else d for d in (d_stream, d_normalized))
        dh, d_dropped, sums = ops.add_norm_backward(
            d_stream, d_normalized, stream, weight, mean, scale, seed, ctx.keep, ctx.has_bias
        )
        d_branch = None if not ctx.has_branch else dh if seed is None else d_dropped
        d_weight, d_bias = (None, None) if weight is None else sums[:2]
        return dh, d_branch, sums[-1] if ctx.has_bias else None, d_weight, d_bias, None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(h: Tensor, branch: Tensor, bias: Tensor | None, seed: Tensor | None, keep: float) -> Tensor:
        return ops.add(h, branch, bias, seed, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, bias, ctx.seed, ctx.keep = inputs  # Not a saved tensor: recomputation of a block can end before the addition.
        ctx.has_bias = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.seed is None and not ctx.has_bias:
            return d_stream, d_stream, None, None, None
        d_dropped, sums = ops.add_backward(d_stream, ctx.seed, ctx.keep)
        return d_stream, d_stream if ctx.seed is None else d_dropped, sums[0] if ctx.has_bias else None, None, None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.bias_gelu(x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, d_bias = ops.bias_gelu_backward(d_output, x, bias)
        return dx, None if bias is None else d_bias
