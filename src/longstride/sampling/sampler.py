"""Logits -> probabilities -> bytes: small pure functions.

The random number for a byte depends only on the seed, the sample's index and the byte's position, so a sample is the same in
any batch.

Shapes: logits and probabilities [batch, 256]; sample indices, uniform numbers and bytes [batch].
"""

import torch
from torch import Tensor

from longstride.sampling.params import SamplingParams

SPLITMIX64 = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
RANDOM_BITS = 32
"""Bits of a random number: few enough that its product with a sum of probabilities stays below that sum."""


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns softmax(logits / temperature) in float64, with 0 for bytes outside of top_k and, of the rest, of top_p. Ties
    favour the smaller byte. Not normalized."""
    scaled = logits if params.temperature == 1 else logits.double() / params.temperature
    full = torch.softmax(scaled, -1, torch.float64)
    if not params.has_filter:
        return full
    ordered, byte = torch.sort(full, dim=-1, descending=True, stable=True)
    if params.top_k is not None:
        ordered[:, params.top_k :] = 0
    if params.top_p is not None:
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < params.top_p * ordered.sum(-1, keepdim=True), ordered, 0)
    return torch.zeros_like(full).scatter(-1, byte, ordered)


def random_state(seed: int, samples: Tensor) -> Tensor:
    """Returns an int64 state for each sample index, from which `uniform` draws: the hash of seed and index."""
    return _splitmix64(_splitmix64(torch.as_tensor(_as_int64(seed), device=samples.device)) + samples)


def uniform(state: Tensor, position: int | Tensor) -> Tensor:
    """Returns random numbers in [0, 1) for the bytes at `position`, one per state."""
    return _logical_shift_right(_splitmix64(state + position), 64 - RANDOM_BITS).double() * 2.0**-RANDOM_BITS


def pick_bytes(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first byte whose cumulative probability exceeds `uniform` of the total; uint8."""
    sums = probabilities.cumsum(-1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0].to(torch.uint8)


def _splitmix64(x: Tensor) -> Tensor:
    """The splitmix64 hash; products wrap around in int64."""
    x = x + _as_int64(SPLITMIX64[0])
    x = (x ^ _logical_shift_right(x, 30)) * _as_int64(SPLITMIX64[1])
    x = (x ^ _logical_shift_right(x, 27)) * _as_int64(SPLITMIX64[2])
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
