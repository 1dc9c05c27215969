"""Which of the Hopper kernels takes a pass, if any does. Without Triton's lower level, which older versions lack, none does.

    walk    Local with a reach of up to 128: a program walks along the sequence, or along documents of any lengths
    lanes   lanes short enough to be in shared memory whole: Block, and Column where n / l is small
    chunks  forward, lanes that are too long for that and have up to 2,048 positions: as many small programs as fit
    tiles   one tile of keys after the other: summary cells, Dense, and what is too long for the others

All read tensors with TMA, which wants addresses and strides that are multiples of 16 bytes. They compute one pattern for all
heads, except that each head may have other summary cells. What they do not take, the general kernels do; also lanes of a few
positions, such as those of Column in short sequences, of which the general kernels put several into one tile.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from longstride.attention.kernels.jobs import Job, Pass, passes

Kind = Literal["walk", "lanes", "chunks", "tiles"]
TILE = 128
"""Keys of a tile, and how far a walk looks back at most."""
ROWS = 64
"""Queries of a warpgroup. Walks, lanes and chunks pass over keys by so many, too."""
WIDEST = 64
"""The widest head in one panel, whose accumulators fit into the registers of a warpgroup."""
WIDTHS = (32, 64)
"""Head dimensions of walks, lanes and chunks."""
WIDE = (64, 128)
"""d_qk and d_v of heads with wider values, which lie in panels of d_qk columns: all but windows in tiles take them."""
SHORT_LANE = 16
"""The most rows of lanes that the general kernels compute, several in a tile. Here each would take a tile of 64."""
LEAST_DOCUMENT = 96
"""The mean length of documents from which a walk takes them. Each takes at least a tile of 64, and backward one or two tiles
of zeros before it: the general kernels are faster at 64, and a walk at 128 (`benchmarks/layouts.py --parts lengths`)."""
LONGEST_LANE = 256
"""The most rows of a lane, forward: what a TMA copy can have."""
LONGEST_WIDE_LANE = 128
LARGEST_LANE = 64 * 128
"""The most rows times d_qk of a lane, backward: five such tiles share the memory of a program."""
LANES_FIRST: tuple[int, ...] = WIDTHS
"""The d_v for which Column's lanes come before Local's walk, forward: a walk copies in the output of an earlier pass faster
than lanes would. With d_v = 128 a walk has too little room for it."""
LONGEST_CHUNKS = 2048
"""The most rows of a lane in chunks. One lane of 4,096 takes 7 % less time in tiles, whose items share keys."""


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and find_spec("triton.experimental.gluon") is not None
    )


def choose(pass_: Pass, backward: bool, accumulate: bool, heads: int, n: int, d_qk: int, d_v: int) -> Kind | None:
    """The kind of kernel for a pass, by the pass and the shape alone; None if there is none."""
    job = pass_.jobs[0]
    alike = all(other == job._replace(head=head, first_cell=other.first_cell) for head, other in enumerate(pass_.jobs))
    if not alike or len(pass_.jobs) < heads or pass_.most_exclusions or job.block < job.limit:
        return None
    if job.lanes > 1 and job.limit <= SHORT_LANE:
        return None
    whole_past = job.far >= job.limit - 1
    if not pass_.summary and job.own:
        is_walk = job.lanes == 1 and job.far <= TILE and job.near == 0
        if is_walk and _in_panels(d_qk, d_v) and not (backward and accumulate):
            return "walk"
        if whole_past and _whole_lanes(job, backward, d_qk, d_v):
            return "lanes"
        in_chunks = whole_past and job.near == 0 and job.lanes > 1 and job.limit <= LONGEST_CHUNKS
        if in_chunks and not (backward or accumulate) and d_qk == d_v and d_qk in WIDTHS:
            return "chunks"
    stats_fit = not backward or own_blocks_apart(pass_, d_qk, d_v) or _stats_fit_tma(job)
    in_registers = max(d_qk, d_v) <= WIDEST or (whole_past and (d_qk, d_v) == WIDE)
    if in_registers and _in_tiles(job, pass_.summary, n) and stats_fit:
        return "tiles"
    return None


def long_enough(documents: Sequence[int]) -> bool:
    """Whether a walk takes documents of these lengths."""
    return len(documents) > 0 and sum(documents) >= LEAST_DOCUMENT * len(documents)


def walks_documents(tensors: Sequence[Tensor], patterns: str, documents: Sequence[int]) -> bool:
    """Whether a walk computes all documents in one launch, as fast as one sequence. tensors: q, k, v, and others for TMA."""
    q, k, v = tensors[:3]
    if q.shape != k.shape or not long_enough(documents) or not is_hopper(q.device) or not fits_tma(*tensors):
        return False
    return _is_one_walk(patterns, max(documents), q.shape[1], q.shape[3], v.shape[3])


@lru_cache(maxsize=256)
def _is_one_walk(patterns: str, longest: int, heads: int, d_qk: int, d_v: int) -> bool:
    first, *others = passes(patterns, longest)
    kinds = {choose(first, backward, False, heads, longest, d_qk, d_v) for backward in (False, True)}
    return kinds == {"walk"} and all(one.empty for one in others)


def own_blocks_apart(pass_: Pass, d_qk: int, d_v: int) -> bool:
    """Whether backward computes the own blocks as whole lanes, apart from the summary cells."""
    return pass_.summary and bool(pass_.jobs[0].own) and _whole_lanes(pass_.jobs[0], True, d_qk, d_v)


def _whole_lanes(job: Job, backward: bool, d_qk: int, d_v: int) -> bool:
    """Whether whole lanes fit into shared memory."""
    longest = LONGEST_WIDE_LANE if d_v > WIDEST else LONGEST_LANE
    return _in_panels(d_qk, d_v) and job.limit <= (LARGEST_LANE // d_qk if backward else longest)


def _in_panels(d_qk: int, d_v: int) -> bool:
    """Whether walks and lanes have heads of these dimensions."""
    return (d_qk == d_v and d_qk in WIDTHS) or (d_qk, d_v) == WIDE


def _in_tiles(job: Job, summary: bool, n: int) -> bool:
    """Whether a TMA copy can be a tile of its lanes, and of its cells."""
    if job.index_stride > 1 and n % job.index_stride:
        return False
    return not summary or TILE % job.cells == 0 or job.cells % TILE == 0


def _stats_fit_tma(job: Job) -> bool:
    """Whether the row stats of a lane, float32, begin at a multiple of 16 bytes."""
    return job.lanes == 1 or job.index_stride > 1 or job.lane_stride % 4 == 0


def fits_tma(*tensors: Tensor) -> bool:
    """Whether TMA reads these in place."""
    return all(
        x.dtype in (torch.float16, torch.bfloat16)
        and x.numel() > 0
        and x.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * x.element_size() % 16 == 0 for stride, size in zip(x.stride()[:3], x.shape) if size > 1
        )
        for x in tensors
    )
