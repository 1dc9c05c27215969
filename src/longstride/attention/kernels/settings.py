"""How large tiles are and how many warps work on one: chosen by what is computed, never by trying it out in a user's call.

The numbers were found by `docs/log.md`'s measurements on the GPU that it names.
"""

from typing import NamedTuple

import torch

from longstride.attention.kernels.jobs import LANE


class Launch(NamedTuple):
    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int


LEAST = 16
"""The smallest side that a matrix instruction takes."""


def launch(kernel: str, summary: bool, width: int, dtype: torch.dtype, longest: int) -> Launch:
    """Settings for a kernel, where `width` is the larger of the head dimensions and `longest` the longest lane."""
    if dtype == torch.float32:  # No matrix units: small tiles, or the sums do not fit into registers.
        found = Launch(32, 32, 4, 1) if width <= 64 else Launch(16, 16, 4, 1)
    elif width > 64:
        found = Launch(64, 64, 4, 2) if width <= 128 else Launch(64, 32, 8, 2)
    else:
        found = TABLE[kernel, summary]
    # A lane that is shorter than a tile would leave the rest of it idle.
    most = max(LEAST, 1 << (longest - 1).bit_length())
    if kernel == "forward" or kernel == "dq":
        return found._replace(rows=min(found.rows, most), columns=found.columns if summary else min(found.columns, most))
    return found if summary else found._replace(rows=min(found.rows, most), columns=min(found.columns, most))


class LaneLaunch(NamedTuple):
    """Settings for lanes that fit into a tile whole."""

    rows: int
    together: int
    """Lanes of a tile."""
    warps: int
    stages: int
    per_processor: int
    """Programs that a multiprocessor holds at a time."""


def lane_launch(
    backward: bool, later: bool, width_qk: int, width_v: int, dtype: torch.dtype, longest: int
) -> LaneLaunch | None:
    """The same for whole lanes, or None where the tiles of `stages` lanes would not fit into shared memory."""
    width = max(width_qk, width_v)
    length = 1 << (longest - 1).bit_length()
    most = LANE if width <= 64 or (not backward and width_qk <= 64) else LANE // 2
    if length > most or dtype == torch.float32 or width > 128:
        return None
    rows = max(LANE // 4, length)
    stages = (3 if width <= 32 else 2) if backward else (4 if width <= 32 else 3)
    if width > 64 and later and rows > LANE // 4:
        stages -= 1
    warps = 8 if rows == LANE or (rows == LANE // 2 and width > 64) else 4
    per_processor = {LANE: 1, LANE // 2: 2}.get(rows, 2 if backward else 3)
    return LaneLaunch(rows, rows // length, warps, stages, per_processor)


TABLE = {
    ("forward", False): Launch(64, 64, 4, 2),
    ("forward", True): Launch(128, 64, 4, 3),
    ("dq", False): Launch(64, 64, 4, 1),
    ("dq", True): Launch(64, 64, 4, 3),
    ("dkv", False): Launch(32, 64, 4, 1),
    ("dkv", True): Launch(128, 64, 4, 2),
}
