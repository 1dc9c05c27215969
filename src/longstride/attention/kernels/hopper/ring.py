"""Rings: tiles in shared memory with mbarriers, which one warp fills by TMA and others use. And the items of a program.

The producer waits until a tile is empty and starts a TMA copy into it. The consumers wait until it is full, compute, and
release it. Turn `turn` of a ring uses tile `turn` modulo the number of tiles; how often the ring has gone round says which
phase of a barrier to wait for.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Ring:
    """A ring of tiles with two mbarriers each: `full` completes by bytes, `empty` when all consumers have arrived.

    A tile of values may have several panels of columns, which lie one after the other: [stages * panels, rows, columns].
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    panels: gl.constexpr
    bytes: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages, panels):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.panels = gl.constexpr(panels)
        self.bytes = gl.constexpr(panels * tiles.shape[1] * tiles.shape[2] * tiles.dtype.primitive_bitwidth // 8)

    @gluon.jit
    def wait_full(self, turn):
        mbarrier.wait(self.full.index(turn % self.stages), (turn // self.stages) & 1)
        return self.tile(turn)

    @gluon.jit
    def release(self, turn):
        mbarrier.arrive(self.empty.index(turn % self.stages), count=1)

    @gluon.jit
    def tile(self, turn, panel: gl.constexpr = 0):
        return self.tiles.index(turn % self.stages * self.panels + panel)

    @gluon.jit
    def tile_panels(self, turn):
        result = ()
        for panel in gl.static_range(self.panels):
            result = result + (self.tile(turn, panel),)
        return result

    @gluon.jit
    def begin(self, turn, size: gl.constexpr):
        """Waits until the tile is empty, and sets how many bytes fill it."""
        stage = turn % self.stages
        mbarrier.wait(self.empty.index(stage), ((turn // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), size)

    @gluon.jit
    def copy(self, turn, descriptor, coordinates):
        """Starts the copy of blocks of the descriptor, each as large as a panel of a tile. coordinates: of the first one."""
        full = self.full.index(turn % self.stages)
        for panel in gl.static_range(self.panels):
            tile = self.tile(turn, panel)._reinterpret(self.tiles.dtype, descriptor.block_type.shape, descriptor.layout)
            if panel > 0:
                coordinates = coordinates[:4] + (panel * self.tiles.shape[2],)
            tma.async_copy_global_to_shared(descriptor, coordinates, full, tile)

    @gluon.jit
    def fill(self, turn, descriptor, coordinates):
        self.begin(turn, self.bytes)
        self.copy(turn, descriptor, coordinates)


@gluon.jit
def make_tiles(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [count, rows, columns], layout)


@gluon.jit
def make_panels(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, panels: gl.constexpr):
    """For each panel of `columns` columns its own tiles. A product takes a panel as it takes a matrix of that width."""
    result = ()
    for _ in gl.static_range(panels):
        result = result + (make_tiles(dtype, count, rows, columns),)
    return result


@gluon.jit
def make_barriers(count: gl.constexpr):
    """mbarriers that complete by bytes."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(count):
        mbarrier.init(barriers.index(index), count=1)
    return barriers


@gluon.jit
def make_ring(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, consumers: gl.constexpr):
    """A ring whose tiles have one panel."""
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=consumers)
    return Ring(make_tiles(dtype, stages, rows, columns), full, empty, stages, 1)


@gluon.jit
def beside(ring, dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, panels: gl.constexpr = 1):
    """Further tiles, filled and emptied together with those of a ring, under its mbarriers."""
    return Ring(make_tiles(dtype, ring.stages * panels, rows, columns), ring.full, ring.empty, ring.stages, panels)


@gluon.jit
def fill_both(ring, other, turn, descriptor, other_descriptor, coordinates):
    """Fills a tile of a ring, and of one beside it."""
    ring.begin(turn, ring.bytes + other.bytes)
    ring.copy(turn, descriptor, coordinates)
    other.copy(turn, other_descriptor, coordinates)


@gluon.jit
def rounds(items):
    """How many items this program has."""
    programs = gl.num_programs(0)
    whole = items // programs
    return whole + (item_of_round(whole) < items).to(gl.int32)


@gluon.jit
def item_of_round(turn):
    """The item of a program's turn. Items come with less and less work, so every other round runs backwards."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
