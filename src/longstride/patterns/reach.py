"""One step of reachability along a union of leaves: bit sets, one pass per leaf."""

from collections.abc import Iterable
from itertools import accumulate
from operator import or_

from longstride.patterns.pair_counts import Parts


def after_step(parts: Parts, reached: list[int]) -> list[int]:
    """Returns the bit sets after one step. Bit j of reached[i]: information from position j has reached position i."""
    dilated, blocks, summaries = parts
    arrived = list(reached)
    for leaf in (*_dilated(dilated, reached), *_blocks(blocks, reached), *_summaries(summaries, reached)):
        arrived = [before | new for before, new in zip(arrived, leaf)]
    return arrived


def _dilated(dilated: Iterable[tuple[int, int | None]], reached: list[int]) -> Iterable[Iterable[int]]:
    for step, reach in dilated:
        size = None if reach is None else reach // step + 1
        lanes = [_window_or(reached[lane::step], size) for lane in range(min(step, len(reached)))]
        yield [lanes[position % step][position // step] for position in range(len(reached))]


def _blocks(blocks: Iterable[int], reached: list[int]) -> Iterable[Iterable[int]]:
    for l in blocks:
        yield [bits for start in range(0, len(reached), l) for bits in accumulate(reached[start : start + l], or_)]


def _summaries(summaries: Iterable[tuple[int, int, int]], reached: list[int]) -> Iterable[Iterable[int]]:
    for l, first, last in summaries:
        yield accumulate((bits if first <= key % l < last else 0 for key, bits in enumerate(reached)), or_)


def _window_or(lane: list[int], size: int | None) -> list[int]:
    """Returns the OR over each window of `size` entries. A window is a suffix of one part and a prefix of the next."""
    if size is None or size >= len(lane):
        return list(accumulate(lane, or_))
    parts = [lane[start : start + size] for start in range(0, len(lane), size)]
    prefixes = [bits for part in parts for bits in accumulate(part, or_)]
    suffixes = [bits for part in parts for bits in [*accumulate(reversed(part), or_)][::-1]]
    return prefixes[:size] + [a | b for a, b in zip(suffixes[1:], prefixes[size:])]
