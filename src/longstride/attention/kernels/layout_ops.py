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
from longstride.attention.kernels.ops import check, fill_gradients, forward_like, result_like, triton_forward
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
    output, lse, bits = _layout_like(q, k, v, patterns, scale, documents)
    triton_forward(q, k, v, patterns, scale, (output, bits), _layout(q, k, documents, None))
    return output, torch.mul(bits, LN_2, out=lse), bits


def fill_layout_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills those of dq, dk and dv that are needed."""
    layout = _layout(inputs[0], inputs[1], documents, None if d_lse is None else d_lse.contiguous())
    fill_gradients(gradients, d_output, inputs, saved, patterns, scale, needed, layout)


def _layout(q: Tensor, k: Tensor, documents: Sequence[int], d_lse: Tensor | None) -> Layout | None:
    """None if the launches are those of a plain call."""
    plain = q.shape == k.shape and not documents and d_lse is None
    return None if plain else Layout(tuple(documents), d_lse)


def _layout_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if q.shape == k.shape:
        output, bits = forward_like(q, k, v, patterns, scale)
        return output, torch.empty_like(bits), bits
    check(q, k, v)
    batch, heads, n, _ = q.shape
    if q.stride(1) < q.stride(2):  # The dimensions of the output have q's order in memory.
        output = v.new_empty(batch, n, heads, v.shape[3]).transpose(1, 2)
    else:
        output = v.new_empty(batch, heads, n, v.shape[3])
    bits = v.new_empty((batch, heads, n), dtype=torch.float32)
    return output, torch.empty_like(bits), bits


define_ops("triton", triton_layout_forward, _layout_like, fill_layout_gradients, result_like, by_query=["bits"], layout=True)
