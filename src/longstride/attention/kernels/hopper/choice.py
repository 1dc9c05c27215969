"""Which of the Hopper kernels takes a pass, if any does. Without Triton's lower level, which older versions lack, none does.

    walk    Local with a reach of up to 128: a program walks along the sequence
    lanes   lanes short enough to be in shared memory whole: Block, and Column where n / l is small
    tiles   one tile of keys after the other: summary cells, Dense, and lanes that are too long for the others

All read tensors with the copy engine, which wants addresses and strides that are multiples of 16 bytes, and compute one
pattern for all heads, except that each may have other summary cells. What they do not take the general kernels do.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from longstride.attention.kernels.jobs import Job, Pass

Kind = Literal["walk", "lanes", "tiles"]
TILE = 128
"""Keys of a tile, and the farthest that a walk looks back."""
WIDEST = 64
"""Beyond this the sums of a tile do not fit into the registers of a group of warps."""
WIDTHS = (32, 64)
"""Head dimensions of walks and lanes."""
LONGEST_LANE = 256
LANE_NUMBERS = 64 * 128
"""The most rows of a lane, forward; and rows times dimensions, backward."""


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and find_spec("triton.experimental.gluon") is not None
    )


def choose(one: Pass, backward: bool, later: bool, heads: int, n: int, d_qk: int, d_v: int) -> Kind | None:
    """By the pass and the shape alone."""
    job = one.jobs[0]
    alike = all(other == job._replace(head=head, first_cell=other.first_cell) for head, other in enumerate(one.jobs))
    if not alike or len(one.jobs) < heads or one.most_exclusions or job.block < job.limit:
        return None
    if not one.summary and job.own:
        if d_qk == d_v and d_qk in WIDTHS and job.lanes == 1 and job.far <= TILE and job.near == 0 and not later:
            return "walk"
        if job.far >= job.limit - 1 and whole_lanes(job, backward, d_qk, d_v):
            return "lanes"
    own_apart = one.summary and bool(job.own) and whole_lanes(job, True, d_qk, d_v)
    if max(d_qk, d_v) <= WIDEST and _in_tiles(job, one.summary, n) and (not backward or own_apart or _aligned(job)):
        return "tiles"
    return None


def whole_lanes(job: Job, backward: bool, d_qk: int, d_v: int) -> bool:
    """Whether lanes are short enough to be in shared memory whole."""
    return d_qk == d_v and d_qk in WIDTHS and job.limit <= (LANE_NUMBERS // d_qk if backward else LONGEST_LANE)


def _in_tiles(job: Job, summary: bool, n: int) -> bool:
    """Whether boxes of the copy engine can be tiles of its lanes and cells."""
    if job.step > 1 and n % job.step:
        return False
    return not summary or TILE % job.cells == 0 or job.cells % TILE == 0


def _aligned(job: Job) -> bool:
    """Whether the numbers of a lane's queries, four bytes each, begin at a multiple of 16 bytes."""
    return job.lanes == 1 or job.step > 1 or job.lane_shift % 4 == 0


def copyable(*tensors: Tensor) -> bool:
    """Whether the copy engine reads these in place."""
    return all(
        x.dtype in (torch.float16, torch.bfloat16)
        and x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * x.element_size() % 16 == 0 for stride, size in zip(x.stride()[:3], x.shape) if size > 1
        )
        for x in tensors
    )
