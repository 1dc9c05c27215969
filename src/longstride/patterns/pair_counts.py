"""Counts the (query, key) pairs of a union of leaves, each pair once, without an n x n table.

The queries that see a key j are those at the distances i - j of the dilated leaves, those up to the end of j's block, and
all later ones if j is a summary cell. So one pass over the keys counts the pairs, with a running count of the dilated
distances. Two rules avoid a long pass:

- Dilated leaves alone need no pass: their intersections are dilated as well, so inclusion-exclusion gives a sum of closed
  forms. There are few terms, since all intersections with a step beyond n are the same.
- Shifting query and key by M, the least common multiple of blocks, summaries and unlimited steps, changes nothing. Beyond
  the longest reach the count at n = r + k M is therefore a quadratic in k, and three short lengths determine it.
"""

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from longstride.common.limits import check_limit

CHUNK = 2**18
"""Keys that the pass handles at a time."""
MAX_TERMS = 1024
"""The most terms of inclusion-exclusion; with more, a pass over the keys is faster."""
OVERHEAD = 2**16
"""Fixed cost of any union, in steps of the limit `pair_steps`."""
MIN_LEAVES = 16
"""The least number of leaves that a pass is charged for: its memory depends on the keys alone."""


class Parts(NamedTuple):
    """The parameters of a union's leaves. What depends on every field unpacks it, so that none is forgotten there."""

    dilated: tuple[tuple[int, int | None], ...] = ()
    """(step, reach) of each; reach None: no limit."""
    blocks: tuple[int, ...] = ()
    summaries: tuple[tuple[int, int, int], ...] = ()
    """(block length, first cell, end of the cells) of each."""


def check_steps(unions: list[Parts], n: int) -> None:
    """Raises ValueError if counting the pairs of all these unions would take too long."""
    leaves = sum(map(_leaf_count, unions))
    what = f"the steps that count a union of {leaves:,} leaves at n = {n:,}"
    check_limit("pairs", what, sum(_steps(parts, n) for parts in unions), "pair_steps")


def count_pairs(parts: Parts, n: int) -> int:
    """Returns the number of pairs of a union at length n."""
    check_steps([parts], n)
    return _count(parts, n)


@lru_cache(maxsize=1024)
def _count(parts: Parts, n: int) -> int:
    parts = _normalize(parts, n)
    if _is_dense(parts, n):
        return n * (n + 1) // 2
    if (terms := _intersections(parts, n)) is not None:
        return sum(weight * dilated_pairs(step, reach, n) for (step, reach), weight in terms.items())
    lengths = _lengths_to_count(parts, n)
    counts = [_count_by_key(parts, length) for length in lengths]
    if len(lengths) == 1:
        return counts[0]
    k = (n - lengths[0]) // (lengths[1] - lengths[0])
    return counts[0] + k * (counts[1] - counts[0]) + k * (k - 1) // 2 * (counts[2] - 2 * counts[1] + counts[0])


@lru_cache(maxsize=1024)
def _steps(parts: Parts, n: int) -> int:
    parts = _normalize(parts, n)
    if _is_dense(parts, n) or _intersections(parts, n) is not None:
        return OVERHEAD
    return OVERHEAD + sum(_lengths_to_count(parts, n)) * max(MIN_LEAVES, _leaf_count(parts))


def _leaf_count(parts: Parts) -> int:
    return sum(map(len, parts))


def _normalize(parts: Parts, n: int) -> Parts:
    """Returns parts with the same pairs at length n, normalized: without what lies beyond n."""
    dilated = set()
    for step, reach in parts.dilated:
        last = n - 1 if reach is None else min(reach, n - 1)
        dilated.add((1, 0) if step > last else (step, reach if last < n - 1 else None))
    summaries = {(l, start, stop) for l, start, stop in parts.summaries if start < n}
    blocks = tuple(sorted(set(parts.blocks)))
    return parts._replace(dilated=tuple(sorted(dilated, key=str)), blocks=blocks, summaries=tuple(sorted(summaries)))


def _is_dense(parts: Parts, n: int) -> bool:
    return (1, None) in parts.dilated or any(l >= n for l in parts.blocks)


def _intersections(parts: Parts, n: int) -> dict[tuple[int, int], int] | None:
    """Returns the inclusion-exclusion weight of each intersection of dilated leaves. None with other leaves or too many."""
    if parts != Parts(parts.dilated):
        return None
    return _dilated_intersections(parts.dilated, n)


@lru_cache(maxsize=64)
def _dilated_intersections(dilated: tuple[tuple[int, int | None], ...], n: int) -> dict[tuple[int, int], int] | None:
    terms: dict[tuple[int, int], int] = {}
    for step, reach in dilated:
        last = n - 1 if reach is None else reach
        added = {(step, last): 1}
        for (other, other_last), weight in terms.items():
            both = lcm(step, other), min(last, other_last)
            both = both if both[0] <= both[1] else (1, 0)  # Only the query's own position.
            added[both] = added.get(both, 0) - weight
        for term, weight in added.items():
            terms[term] = terms.get(term, 0) + weight
        terms = {term: weight for term, weight in terms.items() if weight}
        if len(terms) > MAX_TERMS:
            return None
    return terms


def dilated_pairs(step: int, reach: int | None, n: int) -> int:
    """Returns the number of pairs of one dilated leaf."""
    if n == 0:
        return 0
    # n - distance queries look back by `distance`, for distance = 0, step, 2 * step, ..., steps * step.
    steps = (n - 1 if reach is None else min(reach, n - 1)) // step
    return (steps + 1) * n - step * (steps * (steps + 1) // 2)


def _lengths_to_count(parts: Parts, n: int) -> list[int]:
    """Returns the lengths to count: n itself, or three shorter ones, a period apart."""
    dilated, blocks, summaries = parts
    period = 1
    for l in (*blocks, *(l for l, _, _ in summaries), *(step for step, reach in dilated if reach is None)):
        period = lcm(period, l)
        if period > n:
            return [n]
    first = max((reach for _, reach in dilated if reach is not None), default=0)
    first += (n - first) % period
    lengths = [first + k * period for k in range(3)]
    return lengths if sum(lengths) < n else [n]


def _count_by_key(parts: Parts, n: int) -> int:
    """Counts the pairs in a pass over the keys: queries in the key's block, plus dilated distances beyond the block."""
    import torch

    dilated, blocks, summaries = parts
    if n == 0:
        return 0
    dtype = torch.int32 if n < 2**31 else torch.int64
    marked = torch.zeros(n, dtype=torch.uint8, device="cpu")
    for step, reach in dilated:
        marked[: n if reach is None else reach + 1 : step] = 1
    distances = marked.cumsum(0, dtype=dtype)  # [n]: dilated distances up to each distance.
    del marked
    total = 0
    for start in range(0, n, CHUNK):
        key = torch.arange(start, min(n, start + CHUNK), dtype=dtype, device="cpu")
        farthest = n - 1 - key
        seen = distances[farthest]
        if blocks:
            near = torch.zeros_like(key)
            for l in blocks:
                torch.maximum(near, l - 1 - key % l, out=near)
            torch.minimum(near, farthest, out=near)
            seen += near + 1 - distances[near]
        for l, first, last in summaries:
            cell = key % l if l <= n else key
            seen = torch.where((cell >= first) & (cell < min(last, n)), farthest + 1, seen)
        total += int(seen.sum())
    return total
