"""Flop formulas for PyTorch's flop counter: matrix products over the pairs of the patterns only."""

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from longstride.patterns import notation


def count_flops(forward: Any, backward: Any) -> None:
    """Registers flop formulas for an implementation's two ops in `torch.ops.longstride`."""
    register_flop_formula(forward)(_forward_flops)
    register_flop_formula(backward)(backward_flops)


def _forward_flops(q: Any, k: Any, v: Any, patterns: str, *_: Any, **__: Any) -> int:
    """Two products per pair: query with key, and weight with value."""
    return int(2 * q[0] * (q[3] + v[3]) * _pairs(patterns, q[2]))


def backward_flops(gradient: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> int:
    """Five products per pair: the recomputed score, and the gradients of weight, value, query and key."""
    patterns = next(argument for argument in others if isinstance(argument, str))
    return int(2 * q[0] * (3 * q[3] + 2 * v[3]) * _pairs(patterns, q[2]))


def _pairs(patterns: str, n: int) -> int:
    return sum(pattern.pairs(n) for pattern in notation.parse(patterns))
