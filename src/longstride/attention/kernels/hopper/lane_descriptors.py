"""Launches for lanes and walks, and tensor descriptors of lanes for TMA.

A lane is a set of positions at equal distances, as in `patterns.geometry`. A tensor descriptor [batch, heads, lanes, length,
d] shows lanes in place, whatever the strides. TMA reads zeros past the end of a lane, and writes nothing there. Where n is
not a multiple of l there are two sets of lanes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from longstride.attention.kernels.arguments import Scales, compiled
from longstride.attention.kernels.call import Backward, Forward
from longstride.attention.kernels.hopper import choice
from longstride.attention.kernels.hopper.lane_settings import LaneSetting
from longstride.attention.kernels.launch import Descriptor, Launch, constant
from longstride.attention.kernels.settings import processors
from longstride.attention.kernels.work import walk_tiles
from longstride.patterns.geometry import Lanes

APART = 16
"""Stride of a dimension with one entry, in elements. TMA wants a multiple of 16 bytes there, too."""


class LaneLaunch(NamedTuple):
    """`geometry.Lanes`, then what a launch computes: items, which are lanes of one head."""

    first: Any
    lanes: Any
    lane_stride: Any
    length: Any
    index_stride: Any
    items: Any
    heads: Any
    n: Any


class WalkLaunch(NamedTuple):
    """The positions of a walk: the tiles of one head after the other, with some tiles between heads, or documents."""

    positions: Any
    heads: Any
    n: Any
    tiles: Any  # of a head; with documents, of all of them, and backward those between
    table: Any = None  # with documents, for each tile a `work.WalkTile`, int32 [tiles, fields]


class WalkTiles(NamedTuple):
    """How a walk passes over tiles of ROWS positions. Compiled in, as one constexpr."""

    far: Any  # Keys are up to so many positions back,
    back: Any  # which takes so many tiles before the queries' own.
    ahead: Any  # tiles that are copied before they are needed
    part: Any  # queries that backward computes at a time
    panels: Any  # of a value
    documents: Any  # whether there are documents


class LaneTiles(NamedTuple):
    """How a kernel passes over lanes. Compiled in, as one constexpr."""

    near: Any  # Keys are at least so many indices back.
    stages: Any  # lanes in shared memory at a time; one in backward
    staged: Any  # tiles of results on their way out
    part: Any  # keys, or backward queries, that are computed at a time
    panels: Any  # of a value
    heads_first: Any  # whether neighbouring programs take neighbouring heads, not lanes


def lane_descriptor(x: Tensor, lanes: Lanes, block: tuple[int, int, int]) -> Descriptor:
    """Describes x [batch, heads, n, d] as [batch, heads, lanes, length, d]. block: what a copy takes of the last three."""
    # Where a dimension has one entry its stride may be any number, and not always one that TMA takes.
    batch, head, row = (x.stride(index) if x.shape[index] > 1 else APART for index in range(3))
    shape = *x.shape[:2], lanes.lanes, lanes.length, x.shape[3]
    strides = batch, head, lanes.lane_stride * row, lanes.index_stride * row, 1
    return Descriptor(x, lanes.first * x.stride(2), shape, strides, (1, 1, *block))


def heads_side_by_side(x: Tensor) -> bool:
    """Whether heads are closer in memory than positions, as in [batch, n, heads, d]."""
    return x.stride(1) < x.stride(2)


def value_panels(matrices: Sequence[Tensor]) -> int:
    """Of a value, the third matrix; the first is q."""
    panels, rest = divmod(matrices[2].shape[3], matrices[0].shape[3])
    assert panels
    assert not rest
    return panels


def walk_launch(
    kernel: Any, setting: LaneSetting, call: Forward | Backward, matrices: Sequence[Any], results: Any, reach: int,
    between: bool, scale: float | Scales, **flags: bool,
) -> Launch:  # fmt: skip
    """The launch of a walk for Local(reach), whose programs share the positions of all heads. TMA copies those of `matrices`
    that are tensors, others are arguments as they are. results: those that a walk over documents also stores by rows.
    between: whether it has tiles between documents.

    Where heads are side by side in memory, each head has the same number of whole programs. These then read neighbouring
    addresses at about the same time.
    """
    batch, heads, n, d = call.q.shape
    documents, lse = call.layout.documents if call.layout else None, call.lse
    assert reach <= 2 * choice.ROWS
    whole = Lanes(0, 1, n, n, 1)
    back = 1 if reach <= choice.ROWS else 2
    if documents is None:
        sequences, tiles = batch * heads, -(-n // choice.ROWS)
        work = WalkLaunch(sequences * (tiles + back), heads, n, tiles)
    else:
        table = walk_tiles(documents, choice.ROWS, back if between else 0)
        sequences = documents.repeats * heads
        work = WalkLaunch(sequences * len(table), heads, n, len(table), constant(table, lse.device))
    described = [lane_descriptor(x, whole, (1, choice.ROWS, d)) if isinstance(x, Tensor) else x for x in matrices]
    arguments = *described, None if documents is None else results, lse, work, scale
    walk = compiled(
        WalkTiles, far=reach, back=back, ahead=setting.stages, part=setting.part, panels=value_panels(matrices),
        documents=documents is not None,
    )  # fmt: skip
    programs = processors(lse.device) * setting.per_processor
    if heads_side_by_side(matrices[0]) and programs > sequences:
        programs -= programs % sequences
    constants = {"WALK": walk, **flags, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, min(programs, work.positions), arguments, constants)


def lane_launch(
    kernel: Any, settings: Callable[..., LaneSetting], matrices: Sequence[Tensor], results: Sequence[Tensor],
    lanes: Lanes, near: int, others: Sequence[Any], scale: float | Scales, accumulate: bool, **flags: bool,
) -> Launch:  # fmt: skip
    """The launch for these lanes. TMA copies whole lanes of `matrices` in, and tiles of `results` out."""
    batch, heads, n, d = matrices[0].shape
    rows = max(choice.ROWS, 1 << (lanes.length - 1).bit_length())
    panels = value_panels(matrices)
    setting = settings(d, panels, rows, accumulate)
    work = LaneLaunch(*lanes, batch * heads * lanes.lanes, heads, n)
    boxes = [(x, rows) for x in matrices] + [(x, choice.ROWS) for x in results]
    descriptors = [lane_descriptor(x, lanes, (1, height, d)) for x, height in boxes]
    tiles = compiled(
        LaneTiles, near=near, stages=setting.stages, staged=setting.staged, part=setting.part,
        panels=panels, heads_first=heads_side_by_side(matrices[0]),
    )  # fmt: skip
    programs = min(work.items, processors(matrices[0].device) * setting.per_processor)
    constants = {"TILES": tiles, "ACCUMULATE": accumulate, **flags, "num_warps": 4, "maxnreg": setting.registers}
    return Launch(kernel, programs, (*descriptors, *others, work, scale), constants)
