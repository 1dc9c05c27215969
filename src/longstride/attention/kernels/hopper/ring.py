"""What the kernels for Hopper share: tiles in shared memory that one warp fills and others use, and where a tile lies.

A ring has a few tiles. The producer waits until a tile is empty and has the tensor copy engine fill it; the consumers wait
until it is full, compute, and say that they are done. Turn `turn` of a ring uses tile `turn` modulo their number; how often
the ring has gone round tells the two sides which phase of a barrier to wait for.
"""

# mypy: ignore-errors
# Triton compiles this file: its arguments have Triton's types, not Python's.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate


@aggregate
class Ring:
    """Tiles with two barriers each: `full` completes by bytes, `empty` by as many arrivals as there are consumers."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    bytes: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.bytes = gl.constexpr(tiles.shape[1] * tiles.shape[2] * tiles.dtype.primitive_bitwidth // 8)

    @gluon.jit
    def wait_full(self, turn):
        mbarrier.wait(self.full.index(turn % self.stages), (turn // self.stages) & 1)
        return self.tiles.index(turn % self.stages)

    @gluon.jit
    def release(self, turn):
        mbarrier.arrive(self.empty.index(turn % self.stages), count=1)

    @gluon.jit
    def tile(self, turn):
        return self.tiles.index(turn % self.stages)

    @gluon.jit
    def begin(self, turn, size: gl.constexpr):
        """Waits for an empty tile and announces so many bytes."""
        stage = turn % self.stages
        mbarrier.wait(self.empty.index(stage), ((turn // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), size)

    @gluon.jit
    def copy(self, turn, descriptor, place):
        """Copies a box of as many numbers as a tile has."""
        stage = turn % self.stages
        box = self.tiles.index(stage)._reinterpret(self.tiles.dtype, descriptor.block_type.shape, descriptor.layout)
        tma.async_copy_global_to_shared(descriptor, place, self.full.index(stage), box)

    @gluon.jit
    def fill(self, turn, descriptor, place):
        self.begin(turn, self.bytes)
        self.copy(turn, descriptor, place)


@gluon.jit
def make_ring(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, consumers: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=consumers)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return Ring(gl.allocate_shared_memory(dtype, [stages, rows, columns], layout), full, empty, stages)


@gluon.jit
def beside(ring, dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Further tiles that are filled and emptied together with those of a ring, under its barriers."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    tiles = gl.allocate_shared_memory(dtype, [ring.stages, rows, columns], layout)
    return Ring(tiles, ring.full, ring.empty, ring.stages)


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
