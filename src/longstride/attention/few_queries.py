"""Forward for a few queries among many keys, as when a model generates: the keys that they see are gathered.

Tiles would take as long as for all queries of a lane, and each head by itself. Here all heads of one pattern are computed
together, and which keys they see is worked out once for all layers of a model.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from longstride.attention.sequences import Sequences, working_dtype
from longstride.patterns import Pattern

MOST = 16
"""Queries. With more, the keys that some of them see are many more than each sees."""


def are_few(some: Sequences, device: torch.device) -> bool:
    return some.n - some.offset <= MOST and some.offset >= MOST and device.type == "cpu"


def attend_to_seen(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], some: Sequences, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Returns the output of these sequences, and each query's largest score and sum of weights; None if one is not finite
    that may come from a key that another query sees.

    q, k, v: [batch, heads, n, d]. Output [sequences, heads, queries, d], the others without d.
    """
    group = q.shape[1] // k.shape[1]
    dtype = working_dtype(q)
    q, k, v = q[some.queries.batch, :, some.queries.rows], *(x[some.keys.batch, :, some.keys.rows] for x in (k, v))
    shape = q.shape[:3]
    output, row_max, row_sum = q.new_empty((*shape, v.shape[3])), *(q.new_empty(shape, dtype=dtype) for _ in range(2))
    for pattern in dict.fromkeys(heads):
        own = [head for head, other in enumerate(heads) if other == pattern]
        positions, hidden = _seen_keys(pattern, some.n, some.offset)
        keys, values = (x.index_select(2, positions).to(dtype) for x in (k, v))
        if group > 1 or len(own) < len(heads):
            keys, values = (x[:, [head // group for head in own]] for x in (keys, values))
        scores = q[:, own].to(dtype) @ keys.transpose(2, 3) * scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        least = scores.new_full((*scores.shape[:3], 1), torch.finfo(dtype).min)
        largest = torch.cat([scores, least], 3).amax(3, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(3, keepdim=True)
        total.masked_fill_(total == 0, 1)  # Avoids 0 / 0 for a query that sees no key.
        result = (weights @ values).div_(total)
        if hidden is not None and not result.sum().isfinite():
            return None
        output[:, own], row_max[:, own], row_sum[:, own] = result.to(output.dtype), largest.squeeze(3), total.squeeze(3)
    return output, row_max, row_sum


@lru_cache(maxsize=256)
def _seen_keys(pattern: Pattern, n: int, offset: int) -> tuple[Tensor, Tensor | None]:
    """Returns the positions that some query from `offset` on sees, and which of them each does not; None: it sees all."""
    seen = pattern.sees(torch.arange(offset, n)[:, None], torch.arange(n))
    positions = seen.any(0).nonzero().flatten()
    hidden = ~seen[:, positions]
    return positions, hidden if hidden.any() else None
