"""Logits -> probabilities -> bytes: small pure functions. A byte depends on the seed, its sample's number and its position
alone, so that samples are the same whatever else is made beside them.

Shapes: logits and probabilities [batch, 256]; numbers of samples, uniform and bytes [batch].
"""

import torch
from torch import Tensor

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BITS = 32
"""Of a random number: few enough that it stays below 1 when it is multiplied by a sum of probabilities."""


def probabilities(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """softmax(logits / temperature) in float64, then only the `top_k` most likely, and of these the fewest that together
    have `top_p`. Of equally likely bytes the smaller comes first. They need not sum to 1."""
    found = torch.softmax(logits.double() / temperature, -1)
    if top_k is None and top_p is None:
        return found
    ordered, byte = torch.sort(found, dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < top_p * ordered.sum(-1, keepdim=True), ordered, 0)
    return torch.zeros_like(found).scatter(-1, byte, ordered)


def uniform(seed: int, samples: Tensor, position: int | Tensor) -> Tensor:
    """In [0, 1), another for every seed, sample and position (splitmix64, over whole numbers that wrap)."""
    state = _mixed(stream_state(seed, samples) + position)
    return _shifted(state, 64 - BITS).double() * 2.0**-BITS


def stream_state(seed: int, samples: Tensor) -> Tensor:
    """What the seed and a sample's number become, before the position is added."""
    return _mixed(_mixed(torch.as_tensor(_signed(seed), device=samples.device)) + samples)


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
