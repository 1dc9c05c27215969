"""Attention of one new query to its visible cached keys, in plain PyTorch.

Which slots a query sees is written down for some positions at a time, in tables: a step for few streams takes less time than
a few more calls of PyTorch would.

Shapes: q [batch * heads, 1, d_qk]; keys [batch, heads * slots, d_qk]; values [batch, heads * slots, d_v].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longstride.model.slots import NO_SLOT, Slots


class View(NamedTuple):
    """What the heads of a block keep and see at one position."""

    own: Tensor
    """Where the position's key is stored: index into heads * slots, for each head that keeps it."""
    keeping: Tensor | None
    """The heads that keep it; None: all."""
    listed: Tensor | None
    """The slots that are read: indices into heads * slots, [heads * most]; None: the first `most` slots of each head."""
    bias: Tensor
    """[batch * heads, 1, most]: 0 for a key that the query sees, otherwise -inf."""
    blind: Tensor | None
    """[batch * heads, 1, 1]: whether a head's query sees no key; None: every query sees one."""


def views(heads: Sequence[Slots], slots: int, positions: range, batch: int, device: torch.device) -> list[View]:
    """Returns the view at each position. `slots`: of each head in the cache.

    Slots are read in place, without a copy, if queries see at least half of them.
    """
    queries, first = torch.arange(positions.start, positions.stop), slots * torch.arange(len(heads))
    own = torch.stack([head.of(queries) for head in heads], 1)  # [positions, heads]
    lists = [head.listed(queries) for head in heads]
    most = max(listed.shape[1] for listed in lists)
    seen = torch.stack([pad(listed, (0, most - listed.shape[1]), value=NO_SLOT) for listed in lists], 1)
    last = int(seen.max()) + 1 if most else 0
    if last <= 2 * most:
        visible = torch.zeros(*seen.shape[:2], last + 1, dtype=torch.bool).scatter_(2, seen % (last + 1), True)[..., :last]
        listed_rows: Sequence[Tensor | None] = [None] * len(queries)
    else:
        visible = seen >= 0
        listed_rows = (seen.clamp(min=0) + first[:, None]).flatten(1).to(device).unbind()
    bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf).repeat(1, batch, 1)[:, :, None].to(device)
    sees = visible.any(2)
    blind = ~sees.repeat(1, batch)[:, :, None, None].to(device)
    result = []
    for at, (slot, listed) in enumerate(zip(own, listed_rows)):
        keeping = (slot >= 0).nonzero()[:, 0]
        places = (slot + first)[keeping].to(device)
        some = None if len(keeping) == len(heads) else keeping.to(device)
        result.append(View(places, some, listed, bias[at], None if sees[at].all() else blind[at]))
    return result


def decode(q: Tensor, keys: Tensor, values: Tensor, view: View, scale: float, out: Tensor) -> None:
    """Writes the result to `out`, [batch * heads, 1, d_v]; a head whose query sees no key gets 0."""
    weights = torch.baddbmm(view.bias, q, _read(keys, view).mT, alpha=scale).softmax(-1)
    if view.blind is not None:
        weights = weights.masked_fill(view.blind, 0)
    torch.bmm(weights, _read(values, view).to(weights.dtype), out=out)


def _read(cached: Tensor, view: View) -> Tensor:
    """Returns the slots that are read, [batch * heads, most, d]."""
    queries, _, most = view.bias.shape
    rows = cached if view.listed is None else cached.index_select(1, view.listed)
    return rows.view(queries, -1, cached.shape[2])[:, :most]
