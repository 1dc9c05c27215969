"""How many (query, key) pairs a union of leaves has, each pair once, without an n x n table.

For a key j the union sees the distances i - j that a block still reaches, those of the dilated leaves, and all of them if j
is a summary cell. So one pass over the keys counts the pairs, with a running count of the dilated distances. Two rules make
it short for long sequences:

- Leaves that are all dilated need no pass: their intersections are dilated as well, and inclusion and exclusion gives a sum
  of closed forms, which are few, since a common step beyond n is as good as any other.
- Shifting query and key by M, the least common multiple of blocks, summaries and unlimited steps, changes nothing. From the
  longest reach on the count is therefore a quadratic in k at n = r + k M, and three short lengths give the long one.
"""

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from longstride.common.limits import check_limit

CHUNK = 2**18
"""Keys that are looked at together."""
MOST_TERMS = 1024
"""Intersections that inclusion and exclusion keeps; with more a pass over the keys is faster."""
OVERHEAD = 2**16
"""What a union takes, however short, in steps of the limit."""
FEWEST = 16
"""Leaves that a step of the limit stands for at least: memory grows with the keys alone."""


class Parts(NamedTuple):
    """The leaves of a union as plain numbers."""

    dilated: tuple[tuple[int, int | None], ...] = ()
    """Step and reach; no reach: unlimited."""
    blocks: tuple[int, ...] = ()
    summaries: tuple[tuple[int, int, int], ...] = ()
    """Length of a block, and where its cells begin and end."""


def check_steps(unions: list[Parts], n: int) -> None:
    """Raises ValueError where it would take too long to count all these unions."""
    leaves = sum(map(_leaf_count, unions))
    what = f"the steps that count a union of {leaves:,} leaves at n = {n:,}"
    check_limit("pairs", what, sum(_steps(parts, n) for parts in unions), "pair_steps")


def count_pairs(parts: Parts, n: int) -> int:
    """Of a union, at length n."""
    check_steps([parts], n)
    return _count(parts, n)


@lru_cache(maxsize=1024)
def _count(parts: Parts, n: int) -> int:
    parts = _within(parts, n)
    if _is_dense(parts, n):
        return n * (n + 1) // 2
    if (terms := _terms(parts, n)) is not None:
        return sum(weight * dilated_pairs(step, reach, n) for (step, reach), weight in terms.items())
    lengths = _lengths(parts, n)
    found = [_pass(parts, length) for length in lengths]
    if len(lengths) == 1:
        return found[0]
    k = (n - lengths[0]) // (lengths[1] - lengths[0])
    return found[0] + k * (found[1] - found[0]) + k * (k - 1) // 2 * (found[2] - 2 * found[1] + found[0])


@lru_cache(maxsize=1024)
def _steps(parts: Parts, n: int) -> int:
    parts = _within(parts, n)
    if _is_dense(parts, n) or _terms(parts, n) is not None:
        return OVERHEAD
    return OVERHEAD + sum(_lengths(parts, n)) * max(FEWEST, _leaf_count(parts))


def _leaf_count(parts: Parts) -> int:
    return len(parts.dilated) + len(parts.blocks) + len(parts.summaries)


def _within(parts: Parts, n: int) -> Parts:
    """The same pairs at length n and below, without what lies past n."""
    dilated = set()
    for step, reach in parts.dilated:
        last = n - 1 if reach is None else min(reach, n - 1)
        dilated.add((1, 0) if step > last else (step, reach if last < n - 1 else None))
    summaries = {(l, start, stop) for l, start, stop in parts.summaries if start < n}
    return Parts(tuple(sorted(dilated, key=str)), tuple(sorted(set(parts.blocks))), tuple(sorted(summaries)))


def _is_dense(parts: Parts, n: int) -> bool:
    return (1, None) in parts.dilated or any(l >= n for l in parts.blocks)


def _terms(parts: Parts, n: int) -> dict[tuple[int, int], int] | None:
    """Dilated leaves alone, by inclusion and exclusion: intersections with their weights. None if these are too many."""
    if parts.blocks or parts.summaries:
        return None
    return _dilated_terms(parts.dilated, n)


@lru_cache(maxsize=64)
def _dilated_terms(dilated: tuple[tuple[int, int | None], ...], n: int) -> dict[tuple[int, int], int] | None:
    terms: dict[tuple[int, int], int] = {}
    for step, reach in dilated:
        last = n - 1 if reach is None else reach
        added = {(step, last): 1}
        for (other, other_last), weight in terms.items():
            both = lcm(step, other), min(last, other_last)
            both = both if both[0] <= both[1] else (1, 0)  # The query's own position alone.
            added[both] = added.get(both, 0) - weight
        for term, weight in added.items():
            terms[term] = terms.get(term, 0) + weight
        terms = {term: weight for term, weight in terms.items() if weight}
        if len(terms) > MOST_TERMS:
            return None
    return terms


def dilated_pairs(step: int, reach: int | None, n: int) -> int:
    """Of one leaf."""
    if n == 0:
        return 0
    # n - distance queries look back by `distance`, for distance = 0, step, 2 * step, ..., steps * step.
    steps = (n - 1 if reach is None else min(reach, n - 1)) // step
    return (steps + 1) * n - step * (steps * (steps + 1) // 2)


def _lengths(parts: Parts, n: int) -> list[int]:
    """The lengths to count: n itself, or three that are shorter and a period apart."""
    period = 1
    for l in (*parts.blocks, *(l for l, _, _ in parts.summaries), *(step for step, reach in parts.dilated if reach is None)):
        period = lcm(period, l)
        if period > n:
            return [n]
    first = max((reach for _, reach in parts.dilated if reach is not None), default=0)
    first += (n - first) % period
    lengths = [first + k * period for k in range(3)]
    return lengths if sum(lengths) < n else [n]


def _pass(parts: Parts, n: int) -> int:
    """Counts key by key. How many queries see a key is a sum of what its block reaches and the distances beyond."""
    import torch

    if n == 0:
        return 0
    dtype = torch.int32 if n < 2**31 else torch.int64
    marked = torch.zeros(n, dtype=torch.uint8, device="cpu")
    for step, reach in parts.dilated:
        marked[: n if reach is None else reach + 1 : step] = 1
    distances = marked.cumsum(0, dtype=dtype)  # Those of dilated leaves, up to each.
    del marked
    total = 0
    for start in range(0, n, CHUNK):
        key = torch.arange(start, min(n, start + CHUNK), dtype=dtype, device="cpu")
        farthest = n - 1 - key
        seen = distances[farthest]
        if parts.blocks:
            near = torch.zeros_like(key)
            for l in parts.blocks:
                torch.maximum(near, l - 1 - key % l, out=near)
            torch.minimum(near, farthest, out=near)
            seen += near + 1 - distances[near]
        for l, first, last in parts.summaries:
            cell = key % l if l <= n else key
            seen = torch.where((cell >= first) & (cell < min(last, n)), farthest + 1, seen)
        total += int(seen.sum())
    return total
