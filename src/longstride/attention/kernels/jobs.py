"""The geometry of heads as tables of int32 that the kernels read, and which heads share a launch.

A job is one record of `patterns.geometry` for one head. The records of a union are computed one after the other, each
starting from the result of the one before.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from longstride.patterns import Leaf, notation
from longstride.patterns.geometry import geometry


class Job(NamedTuple):
    """One row of the table: the head, and the numbers of its `Geometry`, which documents them."""

    head: int
    lanes: int
    lane_stride: int
    index_stride: int
    limit: int
    near: int
    far: int
    own: int
    block: int
    cells: int
    first_cell: int


class Exclusion(NamedTuple):
    """A leaf whose pairs a job must leave out: all of these conditions hold for them. Neutral unless given."""

    step: int = 1
    reach: int = 2**31 - 1
    block: int = 2**31 - 1
    period: int = 2**31 - 1
    first_cell: int = 0
    cells: int = 2**31 - 1


@dataclass(frozen=True)
class Pass:
    """The jobs of one launch, at most one for each head."""

    jobs: tuple[Job, ...]
    exclusions: tuple[tuple[Exclusion, ...], ...]

    @property
    def summary(self) -> bool:
        """Whether any job has summary cells in earlier lanes."""
        return any(job.cells and job.lanes > 1 for job in self.jobs)

    @property
    def empty(self) -> bool:
        """Whether no query sees a key, since all keys belong to earlier passes: Column(l) after Local(l) if n <= 2 * l."""
        return all(job.near > min(job.far, job.limit - 1) for job in self.jobs)

    @property
    def by_block(self) -> bool:
        """Whether in some job a query does not see its lane's whole past."""
        return any(not job.own or job.block < job.limit for job in self.jobs)

    @property
    def shared(self) -> bool:
        """Whether the jobs are one, for heads 0, 1, 2 and so on."""
        return all(job == self.jobs[0]._replace(head=head) for head, job in enumerate(self.jobs))

    @property
    def longest(self) -> int:
        return max(job.limit for job in self.jobs)

    @property
    def most_exclusions(self) -> int:
        return max(len(some) for some in self.exclusions)

    def member(self, number: int, group: int) -> "Pass":
        """The jobs of this number in each group of heads."""
        kept = [index for index, job in enumerate(self.jobs) if job.head % group == number]
        return Pass(tuple(self.jobs[index] for index in kept), tuple(self.exclusions[index] for index in kept))

    def tiles(self, size: int) -> int:
        """How many tiles of `size` positions the lanes of a head have, at most."""
        return max(job.lanes * -(-job.limit // size) for job in self.jobs)

    def lane_tiles(self, together: int) -> int:
        """How many tiles of so many whole lanes a head has, at most."""
        return max(-(-job.lanes // together) for job in self.jobs)

    def cell_tiles(self, size: int) -> int:
        """The same for the summary cells that later lanes see."""
        return max(-(-(job.lanes - 1) * (job.lane_stride // job.block) * job.cells // size) for job in self.jobs)

    def rows(self) -> tuple[list[tuple[int, ...]], list[list[tuple[int, ...]]]]:
        """The jobs and what they leave out, [jobs, fields] and [jobs, exclusions, fields]."""
        nothing = Exclusion(reach=-1)
        width = max(1, self.most_exclusions)
        return list(self.jobs), [[*some, *[nothing] * (width - len(some))] for some in self.exclusions]


@lru_cache(maxsize=256)
def passes(patterns: str, n: int) -> tuple[Pass, ...]:
    """Returns the launches for these heads' patterns, in order."""
    by_head = [geometry(pattern, n) for pattern in notation.parse(patterns)]
    found = []
    for index in range(max(map(len, by_head))):
        rows = [(head, records[index]) for head, records in enumerate(by_head) if index < len(records)]
        jobs = tuple(Job(head, **{name: getattr(record, name) for name in Job._fields[1:]}) for head, record in rows)
        found.append(Pass(jobs, tuple(tuple(_exclusion(leaf, n) for leaf in record.excluded) for _, record in rows)))
    return tuple(found)


def _exclusion(leaf: Leaf, n: int) -> Exclusion:
    (record,) = geometry(leaf, n)
    if record.summary:
        return Exclusion(period=record.block, first_cell=record.first_cell, cells=record.cells)
    assert not record.near, f"{leaf!r} has a least distance, which an exclusion lacks"
    return Exclusion(step=record.index_stride, reach=record.far * record.index_stride, block=record.block)
