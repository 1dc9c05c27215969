"""Factorizations: the paper's sets of patterns for several heads, and whether a set connects all positions."""

from __future__ import annotations

from collections.abc import Iterable

from longstride.common.checks import whole_number
from longstride.patterns.leaves import Block, Column, Dilated, Local, Summary
from longstride.patterns.pattern import Pattern, parts_of, validate_patterns
from longstride.patterns.reach import after_step


def strided(l: int) -> tuple[Pattern, Pattern]:
    """The paper's strided factorization, for data whose structure aligns with the stride: images, some music."""
    l = whole_number("strided", "l", l, 1, limit="positions")
    return Local(l), Column(l)


def fixed(l: int, c: int) -> tuple[Pattern, Pattern]:
    """The paper's fixed factorization, for data without a period, such as text: blocks, and c summary cells in each."""
    l = whole_number("fixed", "l", l, 1, limit="positions")
    return Block(l), Summary(l, c)


def grid(n: int, p: int) -> tuple[Pattern, ...]:
    """The strided factorization in p dimensions: p patterns of about n ** (1 / p) keys each. grid(l * l, 2) is strided(l).

    A distance below n is a p-digit number in base l, where l ** p >= n; pattern m moves by the m-th digit.
    """
    n = whole_number("grid", "n", n, 1, limit="positions")
    p = whole_number("grid", "p", p, least=2, limit="dimensions")
    l = max(1, round(n ** (1 / p)) - 1)
    while l**p < n:
        l += 1
    return tuple(Dilated(l**m, l ** (m + 1) if m < p - 1 else None) for m in range(p))


def connects(patterns: Iterable[Pattern], n: int) -> bool:
    """Whether every position reaches every later one through the patterns, one step of each, in their order.

    This is the paper's validity criterion: for every j <= i a path j, a, b, ..., i with j in A(1) of a, a in A(2) of b and
    so forth. A step may also stay where it is, as the residual connection does.
    """
    patterns = validate_patterns("connects", (patterns,) if isinstance(patterns, Pattern) else patterns)
    # Bit j of reached[i]: information from position j has reached position i.
    reached = [1 << position for position in range(whole_number("connects", "n", n, least=0, limit="table"))]
    for pattern in patterns:
        reached = after_step(parts_of(pattern), reached)
    return all(bits == (1 << position + 1) - 1 for position, bits in enumerate(reached))
