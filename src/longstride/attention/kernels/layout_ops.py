"""The operators longstride::triton_layout_forward and longstride::triton_layout_backward: what `layout.py` describes.

A call whose q, k and v are alike and whose rows are one document runs the launches of `ops.py`, except that the gradient of
an lse takes the general kernels. Documents with many rows, and heads that share keys, become such calls by `views.py`. The
general kernels do the rest.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from longstride.attention.gradient import define_ops
from longstride.attention.kernels.call import Layout
from longstride.attention.kernels.ops import check, fill_gradients, forward_like, result_like, triton_forward
from longstride.attention.kernels.views import (
    empty_in_order,
    equal_documents,
    fold,
    folded_rows,
    split_documents,
    turn_heads,
    turn_patterns,
    turn_rows,
    turns,
)
from longstride.attention.layout import fill_in_float32

LN_2 = log(2)


def triton_layout_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the lse of each query, natural and in base 2, float32 [batch, heads, n]."""
    output, lse, bits = _layout_like(q, k, v, patterns, scale, documents)
    _fill_results((q, k, v, output), bits, patterns, scale, documents)
    return output, torch.mul(bits, LN_2, out=lse), bits


def _fill_results(
    tensors: Sequence[Tensor], bits: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> None:  # fmt: skip
    """tensors: q, k, v and the output."""
    q, k, v, output = tensors
    count = equal_documents(q.shape, k.shape, documents)
    folded = fold(count, *tensors) if count else None
    if folded is not None:
        rows = folded_rows(bits, count)
        found = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _fill_results(folded, found.flatten(0, 1), patterns, scale, ())
        rows.copy_(found)
        return
    pieces = split_documents(q.shape, k.shape, documents)
    for piece in pieces:
        rows = piece.of(bits)
        found = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _fill_results([piece.of(x) for x in tensors], found, patterns, scale, piece.documents)
        rows.copy_(found)
    if pieces:
        return
    group = 1 if documents else turns(q, k)
    if group > 1:
        rows = turn_rows(bits, group)
        found = torch.empty_like(rows, memory_format=torch.contiguous_format)
        heads = turn_heads(q, group), turn_heads(output, group), found.unbind(), turn_patterns(patterns, group)
        for own_q, own_output, own_rows, chosen in zip(*heads):
            triton_forward(own_q, k, v, chosen, scale, (own_output, own_rows))
        rows.copy_(found)
        return
    triton_forward(q, k, v, patterns, scale, (output, bits), _layout(q, k, documents, None))


def fill_layout_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills those of dq, dk and dv that are needed."""
    (q, k, _), (output, bits) = inputs, saved
    count = equal_documents(q.shape, k.shape, documents)
    folded = fold(count, *gradients, d_output, *inputs, output) if count else None
    if folded is not None:
        rows = folded_rows(bits, count).flatten(0, 1)
        d_rows = None if d_lse is None else folded_rows(d_lse.contiguous(), count).flatten(0, 1)
        given = folded[4:7], (folded[7], rows.contiguous())
        fill_layout_gradients(folded[:3], folded[3], d_rows, *given, patterns, scale, (), needed)
        return
    # All pieces of a call with the gradient of an lse would take the general kernels.
    pieces = split_documents(q.shape, k.shape, documents) if d_lse is None else ()
    for piece in pieces:
        own, d_own = [piece.of(x) for x in gradients], piece.of(d_output)
        given = [piece.of(x) for x in inputs], (piece.of(output), piece.of(bits).contiguous())
        fill_layout_gradients(own, d_own, None, *given, patterns, scale, piece.documents, needed)
    if pieces:
        return
    group = 1 if documents else turns(q, k)
    if group > 1:
        _fill_in_turns(group, gradients, d_output, d_lse, inputs, saved, patterns, scale, needed)
    else:
        _fill_together(gradients, d_output, d_lse, inputs, saved, patterns, scale, documents, needed)


def _fill_in_turns(
    group: int, gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor],
    saved: Sequence[Tensor], patterns: str, scale: float, needed: Sequence[bool],
) -> None:  # fmt: skip
    (dq, *shared), (q, k, v), (output, bits) = gradients, inputs, saved
    rows = turn_rows(bits, group).contiguous().unbind()
    layouts: Sequence[Layout | None] = [None] * group
    if d_lse is not None:
        layouts = [Layout((), own) for own in turn_rows(d_lse.contiguous(), group).contiguous().unbind()]
    parts = [empty_in_order(x, group, *x.shape) if wanted else x.expand(group, 0) for x, wanted in zip(shared, needed[1:])]
    own_gradients = turn_heads(dq, group) if needed[0] else [dq] * group, *(part.unbind() for part in parts)
    own_heads = (turn_heads(x, group) for x in (d_output, q, output))
    for own, d_own, own_q, own_output, own_rows, chosen, layout in zip(
        zip(*own_gradients), *own_heads, rows, turn_patterns(patterns, group), layouts
    ):
        fill_gradients(own, d_own, (own_q, k, v), (own_output, own_rows), chosen, scale, needed, layout)
    for x, part, wanted in zip(shared, parts, needed[1:]):
        if wanted:
            torch.sum(part, 0, out=x)  # In float32.


@fill_in_float32
def _fill_together(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
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
    output = empty_in_order(q, *q.shape[:3], v.shape[3])
    bits = q.new_empty(q.shape[:3], dtype=torch.float32)
    return output, torch.empty_like(bits), bits


define_ops("triton", triton_layout_forward, _layout_like, fill_layout_gradients, result_like, by_query=["bits"], layout=True)
