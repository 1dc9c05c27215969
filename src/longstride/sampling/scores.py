"""Scores: how likely bytes were, and which ones were likelier."""

from typing import NamedTuple

import torch
from torch import Tensor


class Score(NamedTuple):
    """How likely a byte was."""

    logprob: float
    """Natural logarithm of its probability."""
    likely: list[tuple[int, float]]
    """The likeliest bytes at its position with theirs, the likeliest first."""


class Scores(NamedTuple):
    """The scores of n bytes as tensors on the CPU, a tenth of the memory of as many `Score`."""

    logprobs: Tensor
    """float64 [n]"""
    likely_bytes: Tensor
    """uint8 [n, likely]: the likeliest at each position, the likeliest first."""
    likely: Tensor
    """float64 [n, likely]: their logprobs."""

    def put(self, first: int, logits: Tensor, data: bytes) -> None:
        """Scores bytes from index `first` on by the logits of their positions, [len(data), 256]."""
        here = slice(first, first + len(data))
        logprobs = logits.double().log_softmax(-1)
        self.logprobs[here] = logprobs.gather(1, torch.tensor(list(data), device=logits.device)[:, None])[:, 0]
        count = self.likely.shape[1]
        if count:
            # Sorted, as topk does not say which of two equal ones comes first.
            ordered, byte = torch.sort(logprobs, dim=-1, descending=True, stable=True)
            self.likely_bytes[here], self.likely[here] = byte[:, :count], ordered[:, :count]

    @property
    def is_finite(self) -> bool:
        return bool(self.logprobs.isfinite().all())

    def listed(self, first: int = 0, end: int | None = None) -> list[Score]:
        """Returns the scores of the bytes from `first` to `end`."""
        own, data, likely = (x[first:end].tolist() for x in self)
        return [Score(logprob, list(zip(*row))) for logprob, row in zip(own, zip(data, likely))]


def empty_scores(count: int, likely: int) -> Scores:
    """Returns room for the scores of so many bytes. It is taken at once: small results that stay, between large ones that
    do not, would keep the C library from using the memory of the latter again."""
    room = torch.empty(count, likely, dtype=torch.uint8), torch.empty(count, likely, dtype=torch.float64)
    return Scores(torch.empty(count, dtype=torch.float64), *room)


def score(logits: Tensor, data: bytes, likely: int) -> Scores:
    """Returns the score of each byte by the logits of its position, [n, 256], with the `likely` likeliest bytes."""
    scores = empty_scores(len(data), likely)
    scores.put(0, logits, data)
    return scores
