"""How many tiles the kernels for lanes, chunks and walks keep in flight, and how many programs share a multiprocessor.

The numbers were measured on an H200, and say what fits into its 227 KiB of shared memory and 65,536 registers. `registers`
limits the registers of a thread, so that as many programs of 128 threads fit; None: the compiler chooses.
"""

from typing import NamedTuple

from longstride.attention.kernels.hopper.choice import ROWS


class LaneSetting(NamedTuple):
    per_processor: int
    stages: int = 1
    """Lanes in shared memory at a time; of a lane in chunks, tiles of keys; of a walk, tiles that are fetched ahead."""
    staged: int = 2
    """Tiles of results on their way out."""
    part: int = ROWS
    """Keys that a softmax takes at a time; backward, queries of a tile of pairs."""
    registers: int | None = None


def lane_forward_settings(d: int, panels: int, rows: int, accumulate: bool) -> LaneSetting:
    part = ROWS if rows > 2 * ROWS else 2 * ROWS
    if panels > 1:
        return LaneSetting(2, part=part) if rows > ROWS else LaneSetting(4, staged=1, part=part, registers=128)
    if rows > 2 * ROWS:
        if accumulate:
            return LaneSetting(2 if d <= 32 else 1, part=part)
        return LaneSetting(3, part=part, registers=168) if d <= 32 else LaneSetting(2, part=part)
    if accumulate:
        return LaneSetting(4, part=part, registers=128) if d <= 32 else LaneSetting(3, part=part, registers=168)
    return LaneSetting(4, 2, staged=1, part=part, registers=128) if d <= 32 else LaneSetting(2, 2, part=part)


def chunk_settings(d: int) -> LaneSetting:
    return LaneSetting(5, 3, registers=96) if d <= 32 else LaneSetting(3, 3, registers=168)


def lane_backward_settings(d: int, panels: int, rows: int, accumulate: bool) -> LaneSetting:
    if panels > 1:
        return LaneSetting(2, staged=4 if accumulate else 2) if rows == ROWS else LaneSetting(1, staged=4)
    staged = 3 if rows == ROWS else 2
    if rows > 2 * ROWS or d > 32:
        return LaneSetting(2, staged=staged)
    if accumulate:
        return LaneSetting(3, staged=3 * rows // ROWS, part=32, registers=168)
    return LaneSetting(3, staged=staged, registers=168)


def walk_forward_settings(d: int, panels: int, accumulate: bool) -> LaneSetting:
    if panels > 1:
        return LaneSetting(1, 3 if accumulate else 4)
    if accumulate and d > 32:
        return LaneSetting(2, 2)
    return LaneSetting(3, 3, registers=168) if d <= 32 else LaneSetting(2, 3)


def walk_backward_settings(d: int, panels: int) -> LaneSetting:
    if panels > 1:
        return LaneSetting(2, part=32)
    return LaneSetting(3, part=32, registers=168) if d <= 32 else LaneSetting(2)
