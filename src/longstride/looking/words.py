"""What a head looks at most, in words: the byte, how far back it is, and what stands around it."""

import numpy as np
import numpy.typing as npt

from longstride.data.audio import decode
from longstride.data.store import Bytes
from longstride.looking.scene import Scene

Weights = npt.NDArray[np.float32]

LINES = 3
AROUND = 8
"""Bytes on each side of the one that is named."""
LONGEST = 17 + 2 * AROUND + 3
"""Letters of a line."""
SIGNS = {10: "↵", 9: "→"}


def character(byte: int) -> str:
    """Of one byte; others than printable ASCII get a sign."""
    return SIGNS.get(byte, chr(byte) if 32 <= byte < 127 else "·")


def characters(tokens: Bytes) -> str:
    return "".join(map(character, tokens.tolist()))


def named(scene: Scene, byte: int) -> str:
    """A byte as a person knows it: a letter, or a number."""
    if scene.kind == "text":
        return "a space" if byte == 32 else f"'{character(byte)}'" if 32 <= byte < 127 or byte in SIGNS else f"byte {byte}"
    if scene.kind == "audio":
        return f"{decode(bytes([byte]))[0]:+.3f}"
    return str(byte)


def lines(scene: Scene, weights: Weights) -> list[str]:
    """The largest weights of a head. A slot stands for the byte before it, which it has read; the first has read none."""
    position = len(weights) - 1
    largest = [int(slot) for slot in (-weights).argsort(kind="stable")[:LINES] if weights[slot] > 0]
    return [f"{share(weights[slot]):>4} {_where(scene, slot, position)}" for slot in largest]


def share(weight: float) -> str:
    """As a percentage, with a digit more where it is small."""
    return f"{weight:.0%}" if weight >= 0.095 else f"{weight:.1%}"


def _where(scene: Scene, slot: int, position: int) -> str:
    if slot == 0:
        return f"{'the start':>10}"
    back = position - slot + 1
    if scene.kind == "audio":
        return f"{1000 * back / (scene.rate or 1):>8,.1f} ms back ({back:,})"
    if scene.kind == "text":
        # What is around it, but nothing of the future.
        before = characters(scene.tokens[max(0, slot - 1 - AROUND) : slot - 1])
        after = characters(scene.tokens[slot : min(slot + AROUND, position)])
        return f"{back:>5,} back  {before:>{AROUND}}[{character(scene.tokens[slot - 1])}]{after}"
    return f"{back:>5,} back  {scene.tokens[slot - 1]}"
