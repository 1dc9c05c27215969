"""Recomputation of each block, as text: one choice for all blocks, or counts of choices, such as '10*off + 20*on'.

off         keeps everything that the gradients need
selective   keeps the block's input and the results of attention, and recomputes the rest in the backward pass
on          keeps the block's input, and recomputes the block
parts       keeps the block's input, and recomputes the block some rows and some heads at a time
host        as parts, with the input in host memory
auto        chosen by `longstride train` for the memory of the GPU; elsewhere the same as on
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from longstride.common.checks import short_repr

CHOICES = ("off", "selective", "on", "parts", "host")
AUTO = "auto"
IN_PARTS = ("parts", "host")
TERM = re.compile(rf"(?:([0-9]{{1,9}}) *\* *)?({'|'.join(CHOICES)})")


@lru_cache(maxsize=256)
def read(text: str, layers: int) -> tuple[str, ...]:
    """Returns the choice of each block."""
    text = "on" if text == AUTO else text
    if text in CHOICES:
        return (text,) * layers
    terms = [TERM.fullmatch(term.strip()) for term in text.split("+")]
    if not all(terms):
        raise ValueError(f"recompute must be {describe()}, got {short_repr(text)}")
    counts = [(int(term[1] or 1), term[2]) for term in terms if term is not None]
    total = sum(count for count, _ in counts)
    if total != layers:
        raise ValueError(f"recompute = {short_repr(text)} is for {total:,} blocks, and layers = {layers:,}")
    return tuple(choice for count, choice in counts for _ in range(count))


def write(choices: Sequence[str]) -> str:
    """Returns the shortest text that `read` turns into these choices."""
    runs = [(len(list(run)), choice) for choice, run in groupby(choices)]
    if len(runs) == 1:
        return runs[0][1]
    return " + ".join(f"{count}*{choice}" if count > 1 else choice for count, choice in runs)


def describe() -> str:
    return f"one of {', '.join((*CHOICES, AUTO))}, or a sum over the blocks such as '10*off + 20*on'"


class Recomputation:
    """Rule of the config's field; `read` checks the number of blocks."""

    def check(self, owner: str, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{owner}: {name} must be {describe()}, got {short_repr(value)}")
        return value
