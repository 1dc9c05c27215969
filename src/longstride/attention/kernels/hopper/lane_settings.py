"""How many tiles the kernels for lanes, chunks and walks keep in flight, and how many programs share a multiprocessor.

The numbers were measured on an H200, and say what fits into its 227 KiB of shared memory and 65,536 registers. `registers`
is a cap that lets so many programs of 128 threads in; without one the compiler takes what it likes.
"""

from typing import NamedTuple

from longstride.attention.kernels.hopper.choice import ROWS


class LaneForward(NamedTuple):
    per_processor: int
    stages: int
    """Lanes in shared memory at a time."""
    staged: int = 2
    """Tiles of results on their way out."""
    part: int = 2 * ROWS
    """Keys that a softmax takes at a time."""
    registers: int | None = None


def lane_forward_settings(d: int, panels: int, rows: int, accumulate: bool) -> LaneForward:
    if panels > 1:
        if rows > ROWS:
            return LaneForward(2, 1)
        return LaneForward(4, 1, staged=1, registers=128)
    if rows > 2 * ROWS:
        if accumulate:
            return LaneForward(2 if d <= 32 else 1, 1, part=ROWS)
        return LaneForward(3, 1, part=ROWS, registers=168) if d <= 32 else LaneForward(2, 1, part=ROWS)
    if accumulate:
        return LaneForward(4, 1, registers=128) if d <= 32 else LaneForward(3, 1, registers=168)
    return LaneForward(4, 2, staged=1, registers=128) if d <= 32 else LaneForward(2, 2)


class Chunk(NamedTuple):
    per_processor: int
    stages: int
    """Tiles of ROWS keys and values in shared memory at a time."""
    registers: int


def chunk_settings(d: int) -> Chunk:
    return Chunk(5, 3, 96) if d <= 32 else Chunk(3, 3, 168)


class LaneBackward(NamedTuple):
    per_processor: int
    staged: int = 2
    part: int = ROWS
    """Queries of a tile of pairs at a time."""
    registers: int | None = None


def lane_backward_settings(d: int, panels: int, rows: int, accumulate: bool) -> LaneBackward:
    if panels > 1:
        return LaneBackward(2, 2 if not accumulate else 4) if rows == ROWS else LaneBackward(1, 4)
    staged = 3 if rows == ROWS else 2
    if rows > 2 * ROWS or d > 32:
        return LaneBackward(2, staged)
    if accumulate:
        return LaneBackward(3, 3 * rows // ROWS, part=32, registers=168)
    return LaneBackward(3, staged, registers=168)


class Walk(NamedTuple):
    per_processor: int
    ahead: int
    """Tiles that are fetched before they are needed."""
    part: int = ROWS
    registers: int | None = None


def walk_forward_settings(d: int, panels: int) -> Walk:
    if panels > 1:
        return Walk(1, 4)
    return Walk(3, 3, registers=168) if d <= 32 else Walk(2, 3)


def walk_backward_settings(d: int, panels: int) -> Walk:
    if panels > 1:
        return Walk(2, 1, part=32)
    return Walk(3, 1, part=32, registers=168) if d <= 32 else Walk(2, 1)
