"""Which positions have reached which after one step along a union of leaves, as sets of bits, in one pass for each leaf."""

from collections.abc import Iterable
from itertools import accumulate
from operator import or_

from longstride.patterns.pair_counts import Parts


def after_step(parts: Parts, reached: list[int]) -> list[int]:
    """reached[i]: bit j says that what position j held is at position i. Afterwards i also has what its keys had."""
    arrived = list(reached)
    for leaf in (*_dilated(parts, reached), *_blocks(parts, reached), *_summaries(parts, reached)):
        arrived = [before | new for before, new in zip(arrived, leaf)]
    return arrived


def _dilated(parts: Parts, reached: list[int]) -> Iterable[Iterable[int]]:
    for step, reach in parts.dilated:
        size = None if reach is None else reach // step + 1
        lanes = [_window_or(reached[lane::step], size) for lane in range(min(step, len(reached)))]
        yield [lanes[position % step][position // step] for position in range(len(reached))]


def _blocks(parts: Parts, reached: list[int]) -> Iterable[Iterable[int]]:
    for l in parts.blocks:
        yield [held for start in range(0, len(reached), l) for held in accumulate(reached[start : start + l], or_)]


def _summaries(parts: Parts, reached: list[int]) -> Iterable[Iterable[int]]:
    for l, first, last in parts.summaries:
        yield accumulate((held if first <= key % l < last else 0 for key, held in enumerate(reached)), or_)


def _window_or(lane: list[int], size: int | None) -> list[int]:
    """Each entry joined with the `size` - 1 before it. A window is the end of one part and the beginning of the next."""
    if size is None or size >= len(lane):
        return list(accumulate(lane, or_))
    parts = [lane[start : start + size] for start in range(0, len(lane), size)]
    begun = [held for part in parts for held in accumulate(part, or_)]
    ending = [held for part in parts for held in [*accumulate(reversed(part), or_)][::-1]]
    return begun[:size] + [a | b for a, b in zip(ending[1:], begun[size:])]
