"""What the kernels compute for a head, as a row of numbers that a program reads: lanes, a window inside them, summary cells.

As in section 5.5 of the paper, the sequence is looked at in lanes in which a leaf's pairs are close together, but in place:
position `index` of a lane is lane * lane_shift + index * step, so that a lane is a strided view and never copied.

    Dilated   a lane for each residue class modulo the step, and in it a window of `near` to `far` positions back
    Block     a lane for each block (several, where blocks are short), and in it the positions so far in the own block
    Summary   the lanes of Block, and for each the summary cells of all lanes before it, which every query there sees

A job is one leaf of one head, or Block and Summary of one length together. The leaves of a union are computed one after the
other, each starting from what the one before has left, and a pair that two of them share belongs to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from longstride.patterns import Block, Dilated, Leaf, Pattern, Summary, notation

LANE = 128
"""The most rows of a tile that holds whole lanes. Short blocks share a lane of about this length, to fill one."""


class Job(NamedTuple):
    """One row of the table. Numbers past the end of the sequence are cut to it, so that all fit into 32 bits."""

    head: int
    lanes: int
    lane_shift: int
    step: int
    limit: int
    """The most positions in a lane; the last lanes may have fewer."""
    near: int
    far: int
    own: int
    """1 if a query sees its own block, 0 if it sees only the summary cells there."""
    block: int
    cells: int
    """How many summary cells a block has; 0 if they are not seen."""
    first_cell: int


class Exclusion(NamedTuple):
    """A leaf whose pairs a job must leave out: all of these conditions hold for them. Neutral unless given."""

    step: int = 1
    reach: int = 2**31 - 1
    block: int = 2**31 - 1
    period: int = 2**31 - 1
    first_cell: int = 0
    end_cell: int = 2**31 - 1


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
    def grouped(self) -> bool:
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

    def tiles(self, size: int) -> int:
        """How many tiles of `size` positions the lanes of a head have, at most."""
        return max(job.lanes * -(-job.limit // size) for job in self.jobs)

    def lane_tiles(self, together: int) -> int:
        """How many tiles of so many whole lanes a head has, at most."""
        return max(-(-job.lanes // together) for job in self.jobs)

    def cell_tiles(self, size: int) -> int:
        """The same for the summary cells that later lanes see."""
        return max(-(-(job.lanes - 1) * (job.lane_shift // job.block) * job.cells // size) for job in self.jobs)

    def rows(self) -> tuple[list[tuple[int, ...]], list[list[tuple[int, ...]]]]:
        """The jobs and what they leave out, [jobs, fields] and [jobs, exclusions, fields]."""
        nothing = Exclusion(reach=-1)
        width = max(1, self.most_exclusions)
        return list(self.jobs), [[*some, *[nothing] * (width - len(some))] for some in self.exclusions]


@lru_cache(maxsize=256)
def passes(patterns: str, n: int) -> tuple[Pass, ...]:
    """The launches for these heads' patterns, in order."""
    by_head = [_jobs(head, pattern, n) for head, pattern in enumerate(notation.parse(patterns))]
    found = []
    for index in range(max(map(len, by_head))):
        rows = [jobs[index] for jobs in by_head if index < len(jobs)]
        found.append(Pass(tuple(job for job, _ in rows), tuple(some for _, some in rows)))
    return tuple(found)


def _jobs(head: int, pattern: Pattern, n: int) -> list[tuple[Job, tuple[Exclusion, ...]]]:
    jobs = []
    leaves = list(pattern.leaves)
    earlier: list[Leaf] = []
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, Dilated):
            jobs.append(_dilated(head, leaf, earlier, n))
            earlier.append(leaf)
            continue
        assert isinstance(leaf, Block | Summary)
        together: list[Block | Summary] = [leaf]
        if isinstance(leaf, Block):
            together += [other for other in leaves if isinstance(other, Summary) and other.l == leaf.l][:1]
        leaves = [other for other in leaves if other not in together]
        jobs.append((_fixed(head, leaf, together[-1], n), _excluded(earlier, n)))
        earlier += together
    return jobs


def _dilated(head: int, leaf: Dilated, earlier: Sequence[Leaf], n: int) -> tuple[Job, tuple[Exclusion, ...]]:
    step = min(leaf.step, n)
    reach = n if leaf.reach is None else min(leaf.reach, n)
    near, others = 0, []
    for other in earlier:
        # A window whose step divides ours has all our pairs up to its reach: ours begins behind that.
        if isinstance(other, Dilated) and leaf.step % other.step == 0 and other.reach is not None:
            near = max(near, min(other.reach, n) // step + 1)
        else:
            others.append(other)
    job = Job(
        head,
        lanes=step,
        lane_shift=1,
        step=step,
        limit=-(-n // step),
        near=near,
        far=reach // step,
        own=1,
        block=n,
        cells=0,
        first_cell=0,
    )
    return job, _excluded(others, n)


def _fixed(head: int, leaf: Block | Summary, other: Block | Summary, n: int) -> Job:
    """A block, a summary, or a block and the summary of its length."""
    summary = other if isinstance(other, Summary) else None
    block = min(leaf.l, n)
    length = block * max(1, LANE // block)
    return Job(
        head,
        lanes=-(-n // length),
        lane_shift=length,
        step=1,
        limit=min(length, n),
        near=0,
        far=n,
        own=int(isinstance(leaf, Block)),
        block=block,
        cells=0 if summary is None else min(summary.c, n),
        first_cell=0 if summary is None else min(summary.cells.start, n),
    )


def _excluded(leaves: Sequence[Leaf], n: int) -> tuple[Exclusion, ...]:
    excluded = []
    for leaf in leaves:
        if isinstance(leaf, Dilated):
            excluded.append(Exclusion(step=min(leaf.step, n), reach=n if leaf.reach is None else min(leaf.reach, n)))
        elif isinstance(leaf, Block):
            excluded.append(Exclusion(block=min(leaf.l, n)))
        elif isinstance(leaf, Summary):
            cells = leaf.cells
            excluded.append(
                Exclusion(period=min(leaf.l, n), first_cell=min(cells.start, n), end_cell=min(cells.stop, n))
                if leaf.l <= n
                else Exclusion(first_cell=min(cells.start, n), end_cell=min(cells.stop, n))
            )
    return tuple(excluded)
