"""The kernels as PyTorch operators: longstride::triton_forward and longstride::triton_backward.

The output has the layout of v, or of q if the shapes differ, and each gradient that of its input. A plain call, whose q, k
and v are alike and whose rows are one document, is one run (`run.py`). Documents with many rows, and heads that share
keys, become plain calls by `views.py`; Hopper's walk takes documents as they are, also of heads in turns; the gradient of an
lse takes the general kernels, and so does all the rest.
"""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from longstride.attention.gradient import define_ops, needs_dispatcher
from longstride.attention.kernels.call import Layout
from longstride.attention.kernels.hopper.choice import walks_documents
from longstride.attention.kernels.run import LOG2_E, result_like, run_backward, run_forward
from longstride.attention.kernels.views import empty_in_order, parts, turn_heads, turn_patterns, turn_rows, turns
from longstride.patterns import Pattern
from longstride.patterns.notation import write

LN_2 = log(2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256
"""Largest head dimension."""
LONGEST = 2**29
"""Largest n: positions, and sums of two or three of them, must fit 32 bits in the kernels."""


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float, documents: Sequence[int] = (),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale) v over the pairs of each head's pattern, in Triton."""
    patterns = write(heads)
    if return_lse or is_compiling() or needs_dispatcher(q, k, v):
        output, lse = torch.ops.longstride.triton_forward.default(q, k, v, patterns, scale, documents)
        return (output, lse * LN_2) if return_lse else output
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, patterns, scale, documents)  # type: ignore[no-any-return, no-untyped-call]
    return triton_forward(q, k, v, patterns, scale, documents)[0]


class _Attend(torch.autograd.Function):
    """The two operators joined for autograd, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        output, lse = triton_forward(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        needed = ctx.needs_input_grad[:3]
        # With create_graph, call the operator: its error says that there is no second derivative.
        dispatch = torch.is_grad_enabled() or is_compiling() or needs_dispatcher(d_output)
        compute: Any = torch.ops.longstride.triton_backward.default if dispatch else triton_backward
        gradients = compute(d_output, None, *ctx.saved_tensors, *ctx.settings, needed)
        return *(x if wanted else None for x, wanted in zip(gradients, needed)), None, None, None


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the log-sum-exp of each query's scores in base 2, float32 [batch, heads, n]."""
    output, lse = forward_like(q, k, v, patterns, scale, documents)
    if q.shape == k.shape and not documents:
        run_forward(q, k, v, output, lse, patterns, scale)
        return output, lse
    walks = _walks_by_turns((q,), k, v, patterns, documents)
    for (queries, keys, values, part, rows), own in parts((q, k, v, output, lse), documents, not walks):
        group = 1 if own and not walks else turns(queries, keys)
        rows = turn_rows(rows, group)
        found = rows if rows.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
        by_head = turn_heads(queries, group), turn_heads(part, group), turn_patterns(patterns, group)
        for own_q, own_output, chosen, own_rows in zip(*by_head, found.flatten(1, -3)):
            run_forward(own_q, keys, values, own_output, own_rows, chosen, scale, _layout(own_q, keys, own))
        if found is not rows:
            rows.copy_(found)
    return output, lse


def fill_gradients(
    gradients: Sequence[Tensor], d_output: Tensor, d_lse: Tensor | None, inputs: Sequence[Tensor], saved: Sequence[Tensor],
    patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
) -> None:  # fmt: skip
    """Fills those of dq, dk and dv that are needed."""
    q, k, v = inputs
    if q.shape == k.shape and not documents and d_lse is None:
        run_backward(gradients, d_output, inputs, saved, patterns, scale, needed)
        return
    # The kernels take the gradient of the natural lse. A call with one is not split: all its pieces would take the general
    # kernels.
    d_natural_lse = () if d_lse is None else ((d_lse * LOG2_E).contiguous(),)
    output, lse = saved
    walks = d_lse is None and _walks_by_turns((q, d_output), k, v, patterns, documents)
    pieces = d_lse is None and not walks
    for tensors, own in parts((*inputs, output, d_output, *gradients, lse, *d_natural_lse), documents, pieces):
        (q, k, v, output, d_part, dq, *d_keys), rows = tensors[:8], tensors[8:]
        group = 1 if own and not walks else turns(q, k)
        sums = [x[None] for x in d_keys]
        if group > 1:
            sums = [empty_in_order(x, group, *x.shape) if x.dim() == 4 else x.expand(group, 0) for x in d_keys]
        elif q.shape[1] > k.shape[1] and q.dtype != torch.float32:
            sums = [torch.empty_like(x, dtype=torch.float32) for x in sums]
        by_head = *(turn_heads(x, group) for x in (dq, d_part, q, output)), turn_patterns(patterns, group)
        by_query = zip(*(turn_rows(x, group).contiguous().flatten(1, -3) for x in rows))
        for own_dq, d_own, own_q, own_output, chosen, dkv, (own_rows, *own_d_lse) in zip(*by_head, zip(*sums), by_query):
            given = (own_dq, *dkv), d_own, (own_q, k, v), (own_output, own_rows)
            run_backward(*given, chosen, scale, needed, _layout(own_q, k, own, *own_d_lse))
        for x, total in zip(d_keys, sums):
            if group > 1:
                torch.sum(total, 0, out=x)  # In float32.
            elif total.dtype != x.dtype:
                x.copy_(total[0])


def _walks_by_turns(by_query: Sequence[Tensor], k: Tensor, v: Tensor, patterns: str, documents: Sequence[int]) -> bool:
    """Whether Hopper's walk takes all documents in one launch, or in one for each turn of the heads that share keys.

    by_query: q, and other tensors with its heads that the walk reads."""
    if not documents:
        return False
    group = turns(by_query[0], k)
    by_turn = zip(*(turn_heads(x, group) for x in by_query))
    return all(
        walks_documents((own[0], k, v, *own[1:]), chosen, documents)
        for own, chosen in zip(by_turn, turn_patterns(patterns, group))
    )


def _layout(q: Tensor, k: Tensor, documents: Sequence[int], d_lse: Tensor | None = None) -> Layout | None:
    """None if the launches are those of a plain call."""
    plain = q.shape == k.shape and not documents and d_lse is None
    return None if plain else Layout(tuple(documents), d_lse)


def forward_like(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, documents: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check(q, k, v)
    batch, heads, n, _ = shape = q.shape
    # Takes three quarters of the time of new_empty.
    lse = q.new_empty_strided((batch, heads, n), (heads * n, n, 1), dtype=torch.float32)
    return result_like(v) if shape == k.shape else empty_in_order(q, batch, heads, n, v.shape[3]), lse


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    dtype, elsewhere = q.dtype, "impl = 'blocked' takes it"
    if dtype not in DTYPES:
        raise ValueError(f"attend: the Triton kernels take float16, bfloat16 and float32, got {dtype}; {elsewhere}")
    if q.shape[3] > WIDEST or v.shape[3] > WIDEST:
        name, x = ("d_qk", q) if q.shape[3] > WIDEST else ("d_v", v)
        raise ValueError(f"attend: the Triton kernels take {name} up to {WIDEST}, got {x.shape[3]}; {elsewhere}")
    if k.shape[2] > LONGEST:
        raise ValueError(f"attend: the Triton kernels take n up to {LONGEST:,}, got {k.shape[2]:,}; {elsewhere}")
    if dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("attend: impl = 'triton' on a CPU is Triton's interpreter, which is wrong for bfloat16")


triton_backward = define_ops("triton", triton_forward, forward_like, fill_gradients, result_like)
