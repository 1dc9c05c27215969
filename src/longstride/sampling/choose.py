"""Logits -> probabilities -> bytes: small pure functions. A byte depends on the seed, its sample's number and its position
alone, so that samples are the same whatever else is made beside them.

Shapes: logits and probabilities [batch, 256]; numbers of samples, uniform and bytes [batch].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longstride.common.checks import finite_number, whole_number
from longstride.model.config import BYTES

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BITS = 32
"""Of a random number: few enough that it stays below 1 when it is multiplied by a sum of probabilities."""
COLDEST = 0.001
"""Below this temperature, logits divided by it might no longer be finite."""


@dataclass(frozen=True)
class Choice:
    """How bytes are chosen."""

    temperature: float = 1.0
    """Below 1 likely bytes become likelier; 1 is what the network has learned."""
    top_k: int | None = None
    """Only the k most likely bytes."""
    top_p: float | None = None
    """Only the fewest bytes that together have this probability."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, finite_number("generate", name, getattr(self, name)))
        if self.temperature < COLDEST:
            raise ValueError(
                f"generate: temperature must be at least {COLDEST}, got {self.temperature}; "
                "top_k = 1 takes the most likely byte"
            )
        if self.top_k is not None and whole_number("generate", "top_k", self.top_k, 1) > BYTES:
            raise ValueError(f"generate: top_k must be at most {BYTES}, as there are no more bytes, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, got {self.top_p}")

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p is not None


def probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """softmax(logits / temperature) in float64, then only the `top_k` most likely, and of these the fewest that together
    have `top_p`. Of equally likely bytes the smaller comes first. They need not sum to 1."""
    found = torch.softmax(logits.double() / choice.temperature, -1)
    if not choice.filters:
        return found
    ordered, byte = torch.sort(found, dim=-1, descending=True, stable=True)
    if choice.top_k is not None:
        ordered[:, choice.top_k :] = 0
    if choice.top_p is not None:
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < choice.top_p * ordered.sum(-1, keepdim=True), ordered, 0)
    return torch.zeros_like(found).scatter(-1, byte, ordered)


def stream_state(seed: int, samples: Tensor) -> Tensor:
    """What the seed and the numbers of samples become: whole numbers, mixed (splitmix64; they wrap)."""
    return _mixed(_mixed(torch.as_tensor(_signed(seed), device=samples.device)) + samples)


def uniform(state: Tensor, position: int) -> Tensor:
    """In [0, 1), another for every seed, sample and position."""
    return _shifted(_mixed(state + position), 64 - BITS).double() * 2.0**-BITS


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The byte at which the sum of probabilities passes `uniform` of the whole; uint8."""
    sums = probabilities.cumsum(-1)
    return (sums <= uniform[:, None] * sums[:, -1:]).sum(-1).to(torch.uint8)


def _mixed(x: Tensor) -> Tensor:
    x = x + _signed(MIX[0])
    x = (x ^ _shifted(x, 30)) * _signed(MIX[1])
    x = (x ^ _shifted(x, 27)) * _signed(MIX[2])
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, as if there were no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The whole number from -2**63 on that has the same 64 bits."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
