"""Forward for a few queries among many keys, as when a model generates: the keys that they see are gathered.

Tiles would take as long as for all queries of a lane, and each head by itself. Here many heads of one pattern are computed
together, and which keys they see is worked out once for all layers of a model.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from longstride.attention.chunks import nonfinite_products
from longstride.attention.sequences import Sequences, working_dtype
from longstride.patterns import Pattern

MOST = 16
"""Queries. With more, the keys that some of them see are many more than each sees."""
MOST_NUMBERS = 2**21
"""Numbers of the keys and values of heads that are computed together, unless one head has more."""


def are_few(some: Sequences, device: torch.device) -> bool:
    return some.n - some.offset <= MOST and some.offset >= MOST and device.type == "cpu"


def attend_to_seen(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], some: Sequences, scale: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the output of these sequences, and each query's largest score and sum of weights.

    q, k, v: [batch, heads, n, d]. Output [sequences, heads, queries, d], the others without d.
    """
    group = q.shape[1] // k.shape[1]
    dtype = working_dtype(q)
    q, k, v = q[some.queries.batch, :, some.queries.rows], *(x[some.keys.batch, :, some.keys.rows] for x in (k, v))
    shape = q.shape[:3]
    output, row_max, row_sum = q.new_empty((*shape, v.shape[3])), *(q.new_empty(shape, dtype=dtype) for _ in range(2))
    for pattern in dict.fromkeys(heads):
        positions, hidden, count = _seen_keys(pattern, some.n, some.offset)
        most = MOST_NUMBERS // max(1, len(q) * count * (k.shape[3] + v.shape[3]))
        for own, shared in _heads_together([head for head, other in enumerate(heads) if other == pattern], group, most):
            keys, values = (_take(x[:, shared], positions).to(dtype) for x in (k, v))
            # Query heads that share keys are rows of one product: [sequences, heads of keys, heads of each, queries, ...].
            split = len(q), keys.shape[1], len(own) // keys.shape[1], shape[2]
            queries = q[:, own].to(dtype).view(*split, -1).flatten(2, 3)
            scores = (queries @ keys.transpose(2, 3)).mul_(scale).view(*split, count)
            found = _softmax(scores, values, hidden)
            for total, x in zip((output, row_max, row_sum), found):
                total[:, own] = x.reshape(len(q), len(own), *total.shape[2:]).to(total.dtype)
    return output, row_max, row_sum


def _softmax(scores: Tensor, values: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights @ values, and each query's largest score and sum of weights. Overwrites scores.

    scores: [sequences, heads of keys, heads of each, queries, keys]; values: [sequences, heads of keys, keys, d];
    hidden: [queries, keys].
    """
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    largest = scores.new_full((*scores.shape[:4], 1), torch.finfo(scores.dtype).min)
    if scores.shape[4]:
        largest = torch.maximum(largest, scores.amax(4, keepdim=True))
    weights = scores.sub_(largest).exp_()
    total = weights.sum(4, keepdim=True)
    total.masked_fill_(total == 0, 1)  # Avoids 0 / 0 for a query that sees no key.
    rows = weights.flatten(2, 3)
    result = rows @ values
    if hidden is not None and not result.sum().isfinite():  # Maybe 0 * NaN or 0 * inf of a key that is hidden from a query.
        result = rows @ values.masked_fill(~values.isfinite(), 0)
        result += nonfinite_products(rows, values, ~hidden.expand(weights.shape[2:]).flatten(0, 1))
    return result.view(*total.shape[:4], -1).div_(total), largest, total


def _heads_together(own: Sequence[int], group: int, most: int) -> Iterator[tuple[list[int], slice]]:
    """Yields some of these heads of queries, and the heads of keys that they share in equal parts; about `most` of these."""
    sharers = [(shared, list(some)) for shared, some in groupby(own, lambda head: head // group)]
    while sharers:
        first, some = sharers[0]
        step = sharers[1][0] - first if len(sharers) > 1 else 1
        count = 1
        while count < min(most, len(sharers)) and (sharers[count][0], len(sharers[count][1])) == (
            first + count * step,
            len(some),
        ):
            count += 1
        together, sharers = sharers[:count], sharers[count:]
        yield [head for _, some in together for head in some], slice(first, first + count * step, step)


def _take(x: Tensor, positions: Tensor | slice) -> Tensor:
    return x[:, :, positions] if isinstance(positions, slice) else x.index_select(2, positions)


@lru_cache(maxsize=64)
def _seen_keys(pattern: Pattern, n: int, offset: int) -> tuple[Tensor | slice, Tensor | None, int]:
    """Returns the positions that some query from `offset` on sees; which of them each does not, None if it sees all; and how
    many they are.

    Positions side by side are a slice, as all earlier ones, which would be many to keep.
    """
    seen = pattern.sees(torch.arange(offset, n)[:, None], torch.arange(n))
    positions = seen.any(0).nonzero().flatten()
    count = len(positions)
    hidden = ~seen[:, positions]
    first, last = (int(positions[0]), int(positions[-1])) if count else (0, -1)
    places = slice(first, last + 1) if last - first == count - 1 else positions
    return places, hidden if hidden.any() else None, count
