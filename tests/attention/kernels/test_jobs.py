import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.attention.kernels.jobs import Job, passes
from longstride.attention.kernels.work import cell_items, document_table, tile_items
from longstride.patterns import Block, Column, Local, Summary, fixed, strided, union
from longstride.patterns.geometry import Geometry, geometry
from tests.strategies import patterns


def pairs_of(job: Job, exclusions, n: int) -> torch.Tensor:
    """What the kernels compute for a job, pair by pair, straight from the meaning of its fields."""
    seen = torch.zeros(n, n, dtype=torch.bool)
    for lane in range(job.lanes):
        start = lane * job.lane_stride
        length = min(job.limit, (n - 1 - start) // job.index_stride + 1)
        before = lane * (job.lane_stride // job.block) * job.cells
        cells = [cell // job.cells * job.block + job.first_cell + cell % job.cells for cell in range(before)]
        for row in range(length):
            query = start + row * job.index_stride
            seen[query, cells] = True
            for key in range(length):
                inside = key % job.block
                is_cell = job.first_cell <= inside < job.first_cell + job.cells
                own = job.own and row // job.block == key // job.block
                if job.near <= row - key <= job.far and (own or is_cell):
                    seen[query, start + key * job.index_stride] = True
    query, key = torch.arange(n)[:, None], torch.arange(n)[None, :]
    for one in exclusions:
        distance, cell = query - key, key % one.period
        same = (distance % one.step == 0) & (distance <= one.reach) & (query // one.block == key // one.block)
        seen &= ~(same & (cell >= one.first_cell) & (cell < one.first_cell + one.cells))
    return seen


def test_a_row_is_a_head_and_the_numbers_of_its_geometry():
    assert Job._fields[0] == "head"
    assert {*Job._fields[1:]} == {*Geometry._fields} - {"leaves", "excluded"}
    pattern = Block(6) | Summary(6, 2) | Local(3)
    for record, one in zip(geometry(pattern, 50), passes(f"Dense(), {pattern.text}", 50), strict=True):
        assert one.jobs[-1] == Job(head=1, **{name: getattr(record, name) for name in Job._fields[1:]})


def test_kernels_step_through_tables_by_the_width_of_their_rows():
    pytest.importorskip("triton")
    from longstride.attention.kernels import primitives

    (one,) = passes("Block(6) | Summary(6, 2)", 50)
    jobs, exclusions = one.rows()
    assert (len(jobs[0]), len(exclusions[0][0])) == (primitives.JOB_FIELDS.value, primitives.EXCLUSION_FIELDS.value)
    documents = document_table((1, 1, 50, 4), (1, 1, 50, 4), [20, 30])
    assert len(documents.rows[0]) == primitives.DOCUMENT_FIELDS.value
    for items in (
        tile_items(one, documents, 16, False, True),
        tile_items(one, documents, 16, False, False),
        cell_items(one, documents, 16),
    ):
        assert items.shape[1] == primitives.TILE_WORK_FIELDS.value


@given(patterns(), st.integers(1, 70))
@settings(max_examples=300)
def test_jobs_hold_every_pair_once(pattern, n):
    times = torch.zeros(n, n, dtype=torch.int)
    for one in passes(pattern.text, n):
        times += pairs_of(one.jobs[0], one.exclusions[0], n).int()
    assert torch.equal(times, pattern.mask(n).int())


@pytest.mark.parametrize("pattern", [*strided(128), *fixed(128, 32), union(*strided(128)), union(*fixed(128, 32))], ids=repr)
def test_the_papers_heads_need_no_exclusions(pattern):
    found = passes(pattern.text, 1_048_576)
    assert len(found) == (2 if pattern == union(*strided(128)) else 1)
    assert all(one.most_exclusions == 0 for one in found)


@given(patterns(), st.integers(1, 70))
def test_an_empty_pass_has_no_pairs(pattern, n):
    for one in passes(pattern.text, n):
        assert not (one.empty and pairs_of(one.jobs[0], one.exclusions[0], n).any())


@pytest.mark.parametrize(("n", "empty"), [(5, True), (8, True), (16, True), (17, False)])
def test_a_column_after_its_window(n, empty):
    first, second = passes("local(8)|column(8)", n)
    assert not first.empty
    assert second.empty == empty


def test_heads_of_different_patterns_share_a_launch():
    (one,) = passes("Local(128), Column(128), Block(128) | Summary(128, 32), Dense()", 1000)
    assert [job.head for job in one.jobs] == [0, 1, 2, 3]
    first, second = passes("Local(5) | Column(5), Dense()", 1000)
    assert [job.head for job in first.jobs] == [0, 1]
    assert [job.head for job in second.jobs] == [0]


def test_numbers_fit_into_32_bits():
    for pattern in (Local(2**40), Column(2**40), Block(2**40), Summary(2**40, 2**38, 1)):
        for one in passes(pattern.text, 2**30):
            for table in one.rows():
                torch.tensor(table, dtype=torch.int32)
