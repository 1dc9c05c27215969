"""One run of the kernels, forward or backward, by a plan (`launch.py`).

Patterns, scale, shapes, strides, dtype and device determine the launches. Inputs may have any strides; only one whose last
dimension is not contiguous is copied.
"""

from collections.abc import Sequence
from math import log
from typing import Any

from torch import Tensor, empty_like

from longstride.attention.kernels.call import Backward, Forward, Layout, make_plan
from longstride.attention.kernels.launch import Plan, plan_for

LOG2_E = 1 / log(2)
LEAST_SCALE = 1e-30
"""Used for smaller scales, which may be 0 in float32, since -inf * 0 is NaN. Finite scores times this are practically 0."""
ALIGNMENT = 15
"""The bits of an address that are 0 if it is a multiple of 16 bytes."""


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, patterns: str, scale: float, layout: Layout | None = None
) -> None:  # fmt: skip
    """Fills the output, and the log-sum-exp of each query's scores in base 2, float32 [batch, heads, n], contiguous."""
    if scale <= 0:
        q, scale, _ = with_positive_scale(q, scale)
    tensors = readable(q), readable(k), readable(v), output, lse
    aligned = alignment(*tensors)
    key: Any = patterns, scale, aligned, *describe(*tensors[:4])
    if layout is not None:
        key = *key, k.shape, layout.key
    plan_for(key, lambda: make_plan(Forward, tensors, (in_bits(scale),), patterns, aligned is True, layout)).run(tensors)


def run_backward(
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
    matrices = tuple(map(readable, (q, k, v, d_output, output)))
    # A hook of saved tensors may have changed the strides of output and lse.
    tensors: tuple[Tensor, ...] = *matrices, lse.contiguous(), dq, dk, dv
    if layout is not None and layout.d_lse is not None:
        tensors = *tensors, layout.d_lse
    aligned = alignment(*tensors)
    key: Any = patterns, scale, aligned, *needed, *describe(*matrices, dq, dk, dv)
    if layout is not None:
        key = *key, k.shape, layout.key

    def make() -> Plan:
        settings = in_bits(scale), scale, needed[0], needed[1] or needed[2]
        return make_plan(Backward, tensors, settings, patterns, aligned is True, layout)

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


def alignment(*tensors: Tensor) -> bool | tuple[bool, ...]:
    """True if all begin at multiples of 16 bytes, else whether each does: which kernels run depends on some of them.

    Of an input that is copied, the copy counts: the kernels read that.
    """
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return not addresses & ALIGNMENT or tuple(not x.data_ptr() & ALIGNMENT for x in tensors)


def describe(*tensors: Tensor) -> tuple[Any, ...]:
    """Returns the tensors' part of a plan's key: of inputs and results, since inputs that are copies no longer say how those
    that they were copied from, and so the results, lie in memory."""
    first = tensors[0]
    return first.dtype, first.device, first.shape, tensors[2].shape[3], *[x.stride() for x in tensors]


def readable(x: Tensor) -> Tensor:
    """Returns x if its last dimension is contiguous, else a contiguous copy."""
    return x if x.stride()[3] == 1 or x.shape[3] == 1 else x.contiguous()


def result_like(x: Tensor) -> Tensor:
    """Returns an empty tensor like x, in x's order of dimensions in memory, such as [batch, n, heads, d] for projections.

    Rows of d numbers are contiguous, also if x's are not.
    """
    result = empty_like(x)
    return result if result.stride()[3] == 1 else x.new_empty(x.shape)
