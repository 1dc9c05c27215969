"""What each layer and head looks at while the model predicts one byte: the numbers of the paper's figure 2.

Slot t of the network predicts byte t, and its weights go to the slots up to its own. Slot j has read the byte before it,
j - 1; the first slot has read none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention import attend
from longstride.common.checks import whole_number
from longstride.model.transformer import SparseTransformer
from longstride.patterns import Pattern


class Look(NamedTuple):
    weights: Tensor
    """[layers, heads, position + 1]; each row sums to 1, or is 0 where the head sees nothing."""
    probabilities: Tensor
    """[256], of the byte that is predicted."""


@torch.no_grad()
def look(
    model: SparseTransformer,
    tokens: Tensor,
    position: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Look:
    """One pass over the bytes before `position` of one sequence, tokens [n]. Of all weights a row for each head is computed,
    never an n x n matrix."""
    layers = chosen("layers", layers, model.config.layers)
    heads = chosen("heads", heads, model.config.heads)
    if tokens.dim() != 1:
        raise ValueError(f"look: tokens must be one sequence [n], got {list(tokens.shape)}")
    position = whole_number("look", "position", position, 0)
    if position >= len(tokens):
        raise ValueError(f"look: position must be 0 to {len(tokens) - 1:,}, got {position:,}")
    # No slot sees what comes later, so what is cut off changes nothing.
    tokens = tokens[None, : position + 1]
    model._check(tokens)
    rows: dict[int, Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        h = model.embedding(tokens).to(getattr(torch, model.config.precision))
        for number, block in enumerate(model.blocks):
            patterns = model.config.patterns(number)

            def watched(
                q: Tensor, k: Tensor, v: Tensor, number: int = number, patterns: Sequence[Pattern] = patterns
            ) -> Tensor:  # fmt: skip
                if number in layers:
                    rows[number] = last_row(q[0, heads], k[0, heads], [patterns[head] for head in heads])
                return attend(q, k, v, patterns)

            h = h + block(h, attend=watched)
        logits = model.logits(h[:, -1:])[0, 0]
    finally:
        model.train(was_training)
    return Look(torch.stack([rows[layer] for layer in layers]), logits.softmax(-1))


def last_row(q: Tensor, k: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """The weights of the last query, [heads, n], from q and k [heads, n, d]; softmax in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n, width = q.shape[1:]
    scores = torch.einsum("hd,hnd->hn", q[:, -1].to(dtype), k.to(dtype)) / width**0.5
    key = torch.arange(n, device=q.device)
    hidden = ~torch.stack([pattern.sees(n - 1, key) for pattern in patterns])
    # A finite fill, so that a query which sees nothing gets zeros and no NaN.
    return scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1).masked_fill(hidden, 0)


def chosen(name: str, given: Sequence[int] | None, count: int) -> list[int]:
    """The layers or heads that are asked for; all, if none is named."""
    if given is None:
        return list(range(count))
    numbers = [whole_number("look", name, number, 0) for number in given]
    for number in numbers:
        if number >= count:
            raise ValueError(f"look: {name} must be 0 to {count - 1}, got {number}")
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"look: {name} must be one or more different ones, got {numbers}")
    return numbers
