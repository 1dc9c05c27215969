"""Recomputation of each block, as text: one choice for all blocks, or counts of choices, such as '10*off + 20*on'.

Choices may be grouped: '6*(host + 4*again)' is 30 blocks, of which six keep their inputs. Parentheses do not nest.

off         keeps everything that the gradients need
selective   keeps the block's input and the results of attention, and recomputes the rest in the backward pass
on          keeps the block's input, and recomputes the block
parts       keeps the block's input, and recomputes the block some rows and some heads at a time
host        as parts, with the input in host memory
again       as parts, and keeps nothing: its input is recomputed from that of the nearest parts or host block before it
auto        chosen by `longstride train` for the memory of the GPU; elsewhere the same as on
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from longstride.common.checks import short_repr

CHOICES = ("off", "selective", "on", "parts", "host", "again")
AUTO = "auto"
IN_PARTS = ("parts", "host", "again")
COUNT = r"(?:([0-9]{1,9}) *\* *)?"
TERM = re.compile(rf"{COUNT}({'|'.join(CHOICES)})")
GROUP = re.compile(rf"{COUNT}\(([^()]*)\)")
PLUS = re.compile(r"\+(?![^()]*\))")
"""A plus outside of parentheses."""
Runs = list[tuple[int, str]]
"""Counts of choices, in order."""


@lru_cache(maxsize=256)
def read(text: str, layers: int) -> tuple[str, ...]:
    """Returns the choice of each block."""
    plain = "on" if text == AUTO else text
    groups = [(layers, [(1, plain)])] if plain in CHOICES else _read_groups(plain)
    total = sum(times * sum(count for count, _ in runs) for times, runs in groups)
    if total != layers:
        raise ValueError(f"recompute = {short_repr(text)} is for {total:,} blocks, and layers = {layers:,}")
    choices = [choice for times, runs in groups for _ in range(times) for count, choice in runs for _ in range(count)]
    for before, choice in zip(["off", *choices], choices):
        if choice == "again" and before not in IN_PARTS:
            raise ValueError(f"recompute = {short_repr(text)} has 'again' without 'parts' or 'host' before it")
    return tuple(choices)


def _read_groups(text: str) -> list[tuple[int, Runs]]:
    """Returns how often each group of runs comes; a run outside of parentheses is a group of its own."""
    groups = []
    for term in PLUS.split(text):
        grouped = GROUP.fullmatch(term.strip())
        inner = [TERM.fullmatch(one.strip()) for one in (grouped[2].split("+") if grouped else [term])]
        if not all(inner):
            raise ValueError(f"recompute must be {describe()}, got {short_repr(text)}")
        runs = [(int(one[1] or 1), one[2]) for one in inner if one is not None]
        groups.append((int(grouped[1] or 1) if grouped else 1, runs))
    return groups


def segment_slices(choices: Sequence[str]) -> list[slice]:
    """Returns the blocks that are computed together: one, or one and those with the choice 'again' after it."""
    starts = [block for block, choice in enumerate(choices) if choice != "again"]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(choices)])]


def segments(first: str, length: int, layers: int) -> str:
    """Returns the text of segments, of `length` blocks each, that keep the input of their first block as `first` says."""
    count, rest = divmod(layers, length)
    texts = [write([first, *["again"] * (size - 1)]) for size in (length, rest)]
    groups = f"{count}*({texts[0]})" if count > 1 else texts[0]
    return f"{groups} + {texts[1]}" if rest else groups


def write(choices: Sequence[str]) -> str:
    """Returns the shortest text that `read` turns into these choices."""
    runs = [(len(list(run)), choice) for choice, run in groupby(choices)]
    if len(runs) == 1:
        return runs[0][1]
    return " + ".join(f"{count}*{choice}" if count > 1 else choice for count, choice in runs)


def describe() -> str:
    alone = ", ".join((*CHOICES[:-1], AUTO))
    return f"one of {alone}, or a sum over the blocks such as '10*off + 20*on' or '6*(host + 4*again)'"


class Recomputation:
    """Rule of the config's field; `read` checks the number of blocks."""

    def check(self, owner: str, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{owner}: {name} must be {describe()}, got {short_repr(value)}")
        return value
