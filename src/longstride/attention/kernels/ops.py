"""The kernels as PyTorch operators: longstride::triton_forward and longstride::triton_backward.

Inputs may have any strides; only one whose last dimension is not contiguous is copied. The output has the layout of v, and
each gradient that of its input. Patterns, scale, shapes, strides, dtype and device determine the launches, which are kept as
a plan (`launch.py`).
"""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from longstride.attention.gradient import define_ops
from longstride.attention.kernels.call import Backward, Forward, Layout, make_plan
from longstride.attention.kernels.launch import Plan, plan_for
from longstride.patterns import Pattern, notation

LOG2_E = 1 / log(2)
LEAST_SCALE = 1e-30
"""Used for smaller scales, which may be 0 in float32, since -inf * 0 is NaN. Finite scores times this are practically 0."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256
"""Largest head dimension."""
LONGEST = 2**29
"""Largest n: positions, and sums of two or three of them, must fit 32 bits in the kernels."""
ALIGNMENT = 15
"""The bits of an address that are 0 if it is a multiple of 16 bytes."""


def attend_triton(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float) -> Tensor:
    """softmax(q k^T * scale) v over the pairs of each head's pattern, in Triton."""
    patterns = notation.write(heads)
    if torch.compiler.is_compiling() or needs_dispatcher(q, k, v):
        return torch.ops.longstride.triton_forward.default(q, k, v, patterns, scale)[0]  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, patterns, scale)  # type: ignore[no-any-return, no-untyped-call]
    return triton_forward(q, k, v, patterns, scale)[0]


def needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether PyTorch's dispatcher must see the call: for a transform, a mode, a tensor subclass, a profiler, a tensor whose
    memory holds its numbers negated (`Tensor.is_neg`), or none on the meta device.

    Otherwise the operator's Python functions are called directly, which takes half the time.
    """
    for x in tensors:
        if type(x) is not Tensor or x.is_neg() or is_legacy_batchedtensor(x):
            return True
    return (
        tensors[0].is_meta
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
        or _get_tracing_state() is not None
    )


class _Attend(torch.autograd.Function):
    """The two operators joined for autograd, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> Tensor:
        output, lse = triton_forward(q, k, v, patterns, scale)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.patterns, ctx.scale = patterns, scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        needed = ctx.needs_input_grad[:3]
        # With create_graph, call the operator: its error says that there is no second derivative.
        dispatch = torch.is_grad_enabled() or needs_dispatcher(d_output)
        compute: Any = torch.ops.longstride.triton_backward.default if dispatch else triton_backward
        gradients = compute(d_output, *ctx.saved_tensors, ctx.patterns, ctx.scale, needed)
        return *(x if wanted else None for x, wanted in zip(gradients, needed)), None, None


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    elsewhere = "impl = 'blocked' takes it"
    if q.dtype not in DTYPES:
        raise ValueError(f"attend: the Triton kernels take float16, bfloat16 and float32, got {q.dtype}; {elsewhere}")
    if q.shape[3] > WIDEST or v.shape[3] > WIDEST:
        name, x = ("d_qk", q) if q.shape[3] > WIDEST else ("d_v", v)
        raise ValueError(f"attend: the Triton kernels take {name} up to {WIDEST}, got {x.shape[3]}; {elsewhere}")
    if k.shape[2] > LONGEST:
        raise ValueError(f"attend: the Triton kernels take n up to {LONGEST:,}, got {k.shape[2]:,}; {elsewhere}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("attend: impl = 'triton' on a CPU is Triton's interpreter, which is wrong for bfloat16")


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, results: tuple[Tensor, Tensor] | None = None,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the log-sum-exp of each query's scores in base 2, float32 [batch, heads, n].

    results: empty tensors for these, if a layout has other shapes.
    """
    output, lse = results or forward_like(q, k, v, patterns, scale)
    if scale <= 0:
        q, scale, _ = with_positive_scale(q, scale)
    tensors = readable(q), readable(k), readable(v), output, lse
    aligned = is_aligned(*tensors)
    key: Any = patterns, scale, aligned, *describe(*tensors[:4])
    if layout is not None:
        key = *key, k.shape, layout.key
    plan_for(key, lambda: make_plan(Forward, tensors, (in_bits(scale),), patterns, aligned, layout)).run(tensors)
    return output, lse


def fill_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, inputs: Sequence[Tensor], saved: Sequence[Tensor], patterns: str,
    scale: float, needed: Sequence[bool], layout: Layout | None = None,
) -> None:  # fmt: skip
    """Fills those of dq, dk and dv that are needed. They may have any strides but for the last, which is 1."""
    (q, k, v), (output, lse) = inputs, saved
    if not all(needed):  # The kernels may write the others, too.
        gradients = [x if wanted else result_like(like) for x, like, wanted in zip(gradients, inputs, needed)]
    dq, dk, dv = gradients
    sign = 1
    if scale <= 0:
        q, scale, sign = with_positive_scale(q, scale)
    matrices = readable(q), readable(k), readable(v), readable(d_output), output
    tensors: tuple[Tensor, ...] = *matrices, lse, dq, dk, dv
    if layout is not None and layout.d_lse is not None:
        tensors = *tensors, layout.d_lse
    aligned = is_aligned(*tensors)
    key: Any = patterns, scale, aligned, *needed, *describe(*matrices, dq, dk, dv)
    if layout is not None:
        key = *key, k.shape, layout.key

    def make() -> Plan:
        settings = in_bits(scale), scale, needed[0], needed[1] or needed[2]
        return make_plan(Backward, tensors, settings, patterns, aligned, layout)

    plan_for(key, make).run(tensors)
    if sign != 1:
        dq.mul_(sign)


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Returns q times the sign of a scale that is not positive, the rest of the scale, and the sign, which dq needs, too.

    For a scale of 0 these are 0 * q, 1 and 0: NaN and infinity in q or k still make a score NaN.
    """
    return (-q, -scale, -1) if scale < 0 else (q * 0, 1.0, 0)


def in_bits(scale: float) -> float:
    """The scale of scores in base 2."""
    return max(scale, LEAST_SCALE) * LOG2_E


def is_aligned(*tensors: Tensor) -> bool:
    """Whether all begin at multiples of 16 bytes. Of an input that is copied, the copy counts: the kernels read that."""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return not addresses & ALIGNMENT


def describe(*tensors: Tensor) -> tuple[Any, ...]:
    """Returns the tensors' part of a plan's key: of inputs and results, since inputs that are copies no longer say how those
    that they were copied from, and so the results, lie in memory."""
    first = tensors[0]
    return first.dtype, first.device, first.shape, tensors[2].shape[3], *[x.stride() for x in tensors]


def readable(x: Tensor) -> Tensor:
    """Returns x if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def forward_like(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    batch, heads, n, _ = v.shape
    # empty_strided takes half the time of new_empty.
    lse = torch.empty_strided((batch, heads, n), (heads * n, n, 1), dtype=torch.float32, device=v.device)
    return result_like(v), lse


def result_like(x: Tensor) -> Tensor:
    """Returns an empty tensor like x, in x's order of dimensions in memory, such as [batch, n, heads, d] for projections.

    Rows of d numbers are contiguous, also if x's are not.
    """
    result = torch.empty_like(x)
    return result if result.stride(3) == 1 else x.new_empty(x.shape)


triton_backward = define_ops("triton", triton_forward, forward_like, fill_gradients, result_like, by_query=["lse"])
