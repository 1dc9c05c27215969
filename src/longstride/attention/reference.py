"""The oracle: masked softmax, as the paper writes it. Short, any dtype, differentiable as often as PyTorch allows.

Shapes: those of `layout.py`; the result [batch, heads, n, d_v], and the lse [batch, heads, n].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from longstride.attention.layout import layout_documents
from longstride.patterns import Pattern


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], scale: float, documents: Sequence[int] = (),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale) v over the pairs of each head's pattern, with the whole n x n score matrix in memory."""
    if q.shape == k.shape and not documents and not return_lse:
        return _over_pairs(_attend, q, k, v, _masks(q, k, heads), scale)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    by_rows: dict[int, list[Any]] = {}
    for part in layout_documents(q.shape, k.shape, documents):
        if part.queries.start == part.queries.stop:
            continue
        inputs = q[part.batch, :, part.queries], k[part.batch, :, part.keys], v[part.batch, :, part.keys]
        masks = _masks(*inputs[:2], heads)
        results = [_over_pairs(compute, *inputs, masks, scale) for compute in (_attend, _log_sums)[: 1 + return_lse]]
        by_rows.setdefault(part.batch.start, []).append(results)
    rows = [[torch.cat(parts, 2) for parts in zip(*row)] for row in by_rows.values()]
    output, *lse = map(torch.cat, zip(*rows))
    return (output, lse[0]) if return_lse else output


def _masks(q: Tensor, k: Tensor, heads: Sequence[Pattern]) -> Tensor:
    """The visible pairs, bool [heads, queries, keys]. The queries are the last ones."""
    n = k.shape[2]
    return torch.stack([pattern.mask(n, q.device)[n - q.shape[2] :] for pattern in heads])


def _over_pairs(compute: Any, q: Tensor, k: Tensor, v: Tensor, masks: Tensor, scale: float) -> Tensor:
    """Returns compute(q, k, v, hidden pairs, scale).

    Inputs with NaN or infinity are computed query by query over the visible keys, since 0 * NaN in a product with all keys
    would reach other queries. Under torch.compile and torch.func values cannot be inspected, so there it does.
    """
    if not _has_values(q) or all(x.isfinite().all() for x in (q, k, v)):
        return compute(q, k, v, ~masks, scale)  # type: ignore[no-any-return]
    by_head = []
    for head, mask in enumerate(masks):
        rows = []
        for query, seen in enumerate(mask):
            keys = seen.nonzero().squeeze(1)
            rows.append(compute(q[:, head, [query]], k[:, head, keys], v[:, head, keys], ~seen[keys], scale))
        by_head.append(torch.cat(rows, 1))
    return torch.stack(by_head, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """hidden: pairs outside the pattern, bool [..., queries, keys]."""
    scores, empty_rows = _scores(q, k, hidden, scale)
    return scores.softmax(dim=-1).masked_fill(hidden | empty_rows, 0) @ v


def _log_sums(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """The log-sum-exp of each query's scores, [..., queries]."""
    scores, empty_rows = _scores(q, k, hidden, scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.logsumexp(-1).masked_fill(empty_rows.squeeze(-1), -torch.inf)


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the scores [..., queries, keys], -inf at hidden pairs, and which rows have no key, or scores of -inf only.

    Softmax would give NaN in those rows: they are filled with 0.
    """
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    empty_rows = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty_rows, 0), empty_rows


def _has_values(x: Tensor) -> bool:
    """Whether a tensor's values can be inspected: not under torch.compile, torch.func or make_fx, nor on the meta device."""
    traced = (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )
    return type(x) in (Tensor, Parameter) and not traced and x.device.type != "meta"
