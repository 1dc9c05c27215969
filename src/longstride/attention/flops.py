"""What the operators cost, for PyTorch's flop counter: products over the pairs of the patterns, and no more."""

from typing import Any

from torch.utils.flop_counter import register_flop_formula

from longstride.patterns import notation


def count_flops(forward: Any, backward: Any) -> None:
    """Registers formulas for an implementation's two ops, as `torch.ops.longstride` has them."""
    register_flop_formula(forward)(_forward_flops)
    register_flop_formula(backward)(_backward_flops)


def _forward_flops(q: Any, k: Any, v: Any, patterns: str, *_: Any, **__: Any) -> int:
    """Two products for each pair: with the key, and of the weight with the value."""
    return int(2 * q[0] * (q[3] + v[3]) * _pairs(patterns, q[2]))


def _backward_flops(gradient: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> int:
    """Five: the score again, and the gradients of the weight, the value, the query and the key."""
    patterns = next(one for one in others if isinstance(one, str))
    return int(2 * q[0] * (3 * q[3] + 2 * v[3]) * _pairs(patterns, q[2]))


def _pairs(patterns: str, n: int) -> int:
    return sum(pattern.pairs(n) for pattern in notation.parse(patterns))
