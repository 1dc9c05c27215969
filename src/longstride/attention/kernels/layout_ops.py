"""The operators longstride::triton_layout_forward and longstride::triton_layout_backward: what `layout.py` describes.

A call whose q, k and v are alike and whose rows are one document runs the launches of `ops.py`, except that the gradient of
an lse takes the general kernels.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from longstride.attention.gradient import define_ops
from longstride.attention.kernels.call import Layout
from longstride.attention.kernels.ops import fill_gradients, forward_like, result_like, triton_forward
from longstride.patterns import Pattern, notation

LN_2 = log(2)


def attend_triton_layout(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale) v over the pairs of each head's pattern, in Triton, and the lse."""
    results = torch.ops.longstride.triton_layout_forward.default(q, k, v, notation.write(heads), scale, documents)
    return results[0], results[1]


def triton_layout_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the lse of each query, natural and in base 2, float32 [batch, heads, n]."""
    output, bits = triton_forward(q, k, v, patterns, scale)
    return output, bits * LN_2, bits


def fill_layout_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills those of dq, dk and dv that are needed."""
    layout = None if d_lse is None else Layout(d_lse.contiguous())
    fill_gradients(gradients, d_output, inputs, saved, patterns, scale, needed, layout)


def _layout_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output, bits = forward_like(q, k, v, patterns, scale)
    return output, torch.empty_like(bits), bits


define_ops("triton", triton_layout_forward, _layout_like, fill_layout_gradients, result_like, by_query=["bits"], layout=True)
