"""How large tiles are and how many warps work on one: chosen by what is computed, never by trying it out in a user's call.

The numbers were found by `docs/log.md`'s measurements on the GPU that it names.
"""

from typing import NamedTuple

import torch


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
    if dtype == torch.float32:
        found = Launch(32, 32, 4, 1) if width > 64 else Launch(64, 32, 4, 2)
    elif width > 128:
        found = Launch(64, 32, 4, 2)
    elif width > 64:
        found = Launch(64, 64, 4, 2)
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


LANE = 128
"""The most rows of a tile that holds whole lanes."""


def lane_launch(backward: bool, width: int, dtype: torch.dtype, longest: int) -> LaneLaunch | None:
    """The same for whole lanes, or None where they do not fit."""
    if longest > LANE or dtype == torch.float32 or width > 64:
        return None
    length = 1 << (longest - 1).bit_length()
    return LaneLaunch(LANE, LANE // length, 8, 2 if backward else 3, 1)


TABLE = {
    ("forward", False): Launch(64, 64, 4, 2),
    ("forward", True): Launch(128, 64, 4, 3),
    ("dq", False): Launch(64, 64, 4, 1),
    ("dq", True): Launch(64, 64, 4, 3),
    ("dkv", False): Launch(32, 64, 4, 1),
    ("dkv", True): Launch(128, 64, 4, 2),
}
