"""Attention weights of each layer and head for the prediction of one byte: the data of the paper's figure 2.

Position t of the network predicts byte t and attends to positions 0 to t. The input at position j is byte j - 1; at the
first position it is the start vector.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longstride.attention import attend
from longstride.common.checks import whole_number
from longstride.model.transformer import SparseTransformer
from longstride.patterns import Pattern


class Inspection(NamedTuple):
    """Attention weights and prediction at one position."""

    weights: Tensor
    """[layers, heads, position + 1]; each row sums to 1, or is 0 if the head sees no key."""
    probabilities: Tensor
    """[256], of the predicted byte."""


@torch.no_grad()
def inspect_attention(
    model: SparseTransformer,
    tokens: Tensor,
    position: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Inspection:
    """Runs the model on one sequence, tokens [n], and returns the attention weights at `position`. Computes one row of
    weights per head, never an n x n matrix."""
    layers = check_indices("layers", layers, model.config.layers)
    heads = check_indices("heads", heads, model.config.heads)
    if tokens.dim() != 1:
        raise ValueError(f"inspect_attention: tokens must be one sequence [n], got {list(tokens.shape)}")
    position = whole_number("inspect_attention", "position", position, 0)
    if position >= len(tokens):
        raise ValueError(f"inspect_attention: position must be 0 to {len(tokens) - 1:,}, got {position:,}")
    # Attention is causal, so later tokens can be cut off.
    tokens = tokens[None, : position + 1]
    model.check_tokens(tokens)
    rows: dict[int, Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        h = model.embedding(tokens, model.config.dtype)
        rotation = model.embedding.rotation(torch.arange(position + 1, device=tokens.device))
        for index, block in enumerate(model.blocks):
            patterns = model.config.patterns(index)

            def attend_and_record(
                q: Tensor, k: Tensor, v: Tensor, index: int = index, patterns: Sequence[Pattern] = patterns
            ) -> Tensor:  # fmt: skip
                if index in layers:
                    rows[index] = last_row(q[0, heads], k[0, heads], [patterns[head] for head in heads])
                return attend(q, k, v, patterns)

            h = block(h, attend=attend_and_record, rotation=rotation)
        logits = model.logits(h[:, -1:])[0, 0]
    finally:
        model.train(was_training)
    return Inspection(torch.stack([rows[layer] for layer in layers]), logits.softmax(-1))


def last_row(q: Tensor, k: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """Returns the weights of the last query, [heads, n], from q and k [heads, n, d]; softmax in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n, width = q.shape[1:]
    scores = torch.einsum("hd,hnd->hn", q[:, -1].to(dtype), k.to(dtype)) / width**0.5
    key = torch.arange(n, device=q.device)
    hidden = ~torch.stack([pattern.sees(n - 1, key) for pattern in patterns])
    # A finite fill, so that a query without visible keys gets 0 and not NaN.
    return scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1).masked_fill(hidden, 0)


def check_indices(name: str, given: Sequence[int] | None, count: int) -> list[int]:
    """Returns the given layers or heads, validated; all of them for None."""
    if given is None:
        return list(range(count))
    indices = [whole_number("inspect_attention", name, index, 0) for index in given]
    for index in indices:
        if index >= count:
            raise ValueError(f"inspect_attention: {name} must be 0 to {count - 1}, got {index}")
    if not indices or len(set(indices)) < len(indices):
        raise ValueError(f"inspect_attention: {name} must be one or more different ones, got {indices}")
    return indices


def evenly_spaced(count: int, most: int) -> list[int]:
    """Returns up to `most` evenly spaced integers from 0 to count - 1, both included."""
    return [round(number) for number in torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).tolist()]
