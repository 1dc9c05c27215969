"""Attention over queries, keys and values that are side by side in one tensor, as a projection makes them.

    packed [batch, n, heads * d_qk + heads * d_qk + heads * d_v]

The gradient of the packed tensor is one tensor, too: the kernels write dq, dk and dv into it, so that nothing joins them
afterwards. The forward operator is that of `ops.py`, on views; longstride::triton_packed_backward differentiates it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longstride.attention.gradient import backward_flops, define, needs_dispatcher, register_last
from longstride.attention.kernels.ops import triton_forward
from longstride.attention.kernels.run import run_backward
from longstride.patterns import Pattern, notation

Widths = tuple[int, int, int]
"""Widths of the queries, keys and values of all heads."""


def attend_packed_triton(packed: Tensor, sizes: Sequence[int], heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern: [batch, heads, n, d_v]."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        # torch.compile takes no autograd.Function with a `jvp`. The operator has one, which refuses tangents.
        q, k, v = _unpack(packed, sizes, len(heads))
        results = torch.ops.longstride.triton_forward.default(q, k, v, notation.write(heads), scale, ())
    else:
        results = _AttendPacked.apply(packed, tuple(sizes), len(heads), notation.write(heads), scale)  # type: ignore[no-untyped-call]
    return results[0]  # type: ignore[no-any-return]


def _unpack(packed: Tensor, sizes: Sequence[int], heads: int) -> list[Tensor]:
    """As `api.unpack`; no implementation imports `api`."""
    parts: Any = packed.split(list(sizes), -1)  # type: ignore[no-untyped-call]
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts]


class _AttendPacked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(packed: Tensor, sizes: Widths, heads: int, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
        dispatch = torch.compiler.is_compiling() or needs_dispatcher(packed)
        compute: Any = torch.ops.longstride.triton_forward.default if dispatch else triton_forward
        output, lse = compute(*_unpack(packed, sizes, heads), patterns, scale, ())
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        packed, ctx.sizes, ctx.heads, ctx.patterns, ctx.scale = inputs
        ctx.save_for_backward(packed, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        # With create_graph, call the operator: its error says that there is no second derivative.
        dispatch = torch.compiler.is_compiling() or torch.is_grad_enabled() or needs_dispatcher(d_output, saved[0])
        compute: Any = torch.ops.longstride.triton_packed_backward.default if dispatch else triton_packed_backward
        gradient = compute(d_output, *saved, ctx.sizes, ctx.heads, ctx.patterns, ctx.scale)
        return gradient, None, None, None, None


def triton_packed_backward(
    d_output: Tensor, packed: Tensor, output: Tensor, lse: Tensor, sizes: Sequence[int], heads: int, patterns: str,
    scale: float,
) -> Tensor:  # fmt: skip
    """Returns the gradient of the packed tensor."""
    result = packed.new_empty(packed.shape)
    gradients, inputs = _unpack(result, sizes, heads), _unpack(packed, sizes, heads)
    run_backward(gradients, d_output, inputs, (output, lse), patterns, scale, (True, True, True))
    return result


def _flops(
    d_output: Any, packed: Any, output: Any, lse: Any, sizes: Sequence[int], heads: int, patterns: str, scale: float,
    **_: Any,
) -> int:  # fmt: skip
    batch, _, n, _ = d_output
    q = batch, heads, n, sizes[0] // heads
    return backward_flops(q, q, d_output, patterns, scale)


_backward = define(
    "triton_packed_backward",
    "(Tensor d_output, Tensor packed, Tensor output, Tensor lse, int[] sizes, int heads, "
    "str patterns, float scale) -> Tensor",
    triton_packed_backward,
    lambda d_output, packed, *_: packed.new_empty(packed.shape),
    _flops,
)
register_last(_backward, "triton")
