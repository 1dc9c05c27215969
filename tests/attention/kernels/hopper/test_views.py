"""What the copy engine would read, looked at without one: a view is a shape and strides, as PyTorch's own are."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from longstride.attention.kernels.call import Backward
from longstride.attention.kernels.hopper import launch
from longstride.attention.kernels.hopper.lane_boxes import lane_box
from longstride.attention.kernels.jobs import passes
from longstride.attention.kernels.launch import Workspace
from longstride.patterns import notation
from longstride.patterns.geometry import block_lanes, column_lanes

BATCH, HEADS, N, D = 2, 3, 60, 16


def numbered(layout):
    """Every row of [batch, heads, n, d] has a number of its own."""
    batch, head, row, _ = torch.meshgrid(*map(torch.arange, (BATCH, HEADS, N, D)), indexing="ij")
    x = (row + N * (head + HEADS * batch)).half()
    return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "apart" else x


def seen_through(box):
    x = box.tensor
    return x.as_strided(box.shape, box.strides, x.storage_offset() + box.first)


@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize("step", [1, 4, 60])
def test_lanes(step, layout):
    x = numbered(layout)
    view = seen_through(launch._lanes(x, step, 64))
    for lane in range(step):
        assert torch.equal(view[:, :, :, lane], x[:, :, lane::step])


@pytest.mark.parametrize("layout", ["together", "apart"])
def test_cells(layout):
    x = numbered(layout)
    (one,) = passes(notation.write(notation.parse("merged(fixed(25, 8))") * HEADS), N)
    job = one.jobs[0]._replace(block=25, cells=8)
    box = launch._cells(x, job)
    assert box.block == (1, 1, 16, 8, D)
    view = seen_through(box)
    assert torch.equal(view, x[:, :, :50].unflatten(2, (2, 25)))


@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize(("lanes", "l"), [(block_lanes, 25), (block_lanes, 20), (column_lanes, 7), (column_lanes, 10)])
def test_sets_of_lanes_hold_every_position_once(lanes, l, layout):
    x = numbered(layout)
    found = [seen_through(lane_box(x, one, 64)) for one in lanes(N, l)]
    for view in found:  # [batch, heads, lanes, length, d]
        for lane in range(view.shape[2]):
            positions = view[0, 0, lane, :, 0].long()
            same = positions % l if lanes is column_lanes else positions // l
            assert (same == same[0]).all()
            assert (positions.diff() == (l if lanes is column_lanes else 1)).all()
    every = torch.cat([view.flatten(2, 3) for view in found], 2)
    assert torch.equal(every.sort(2).values, x)


def test_what_has_no_neighbour_may_be_any_distance_from_it():
    x = torch.zeros(2000, dtype=torch.float16).as_strided((1, 1, N, D), (7, 3, D, 1))
    for box in (launch._lanes(x, 4, 64), lane_box(x, block_lanes(N, 20)[0], 64)):
        assert all(stride * 2 % 16 == 0 for stride in box.strides[:-1])


def numbers_of(d_output, output, lse, step=1):
    x = output
    call = Backward(x, x, x, d_output, output, lse, x, x, x, 1.0, 1.0, True, True, Workspace(x.device))
    numbers = launch._new_numbers(call, step)
    launch._fill_numbers(call, numbers, step).through_triton([])
    return numbers


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_numbers_of_every_query():
    gradient, output = torch.randn(2, BATCH, HEADS, N + 1, D)
    log_sum_exp = torch.randn(BATCH, HEADS, N + 1)
    log_sum_exp[0, 1, 3] = -torch.inf
    found = numbers_of(gradient.transpose(1, 2).contiguous().transpose(1, 2), output, log_sum_exp)
    assert found.shape == (BATCH * HEADS, 2, N + 4)
    expected = log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf)
    assert torch.equal(found[:, 0, : N + 1].view(BATCH, HEADS, N + 1), expected)
    torch.testing.assert_close(found[:, 1, : N + 1].view(BATCH, HEADS, N + 1), (gradient * output).sum(-1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_numbers_lane_by_lane():
    output = torch.ones(BATCH, HEADS, N, D)
    log_sum_exp = torch.arange(BATCH * HEADS * N).view(BATCH, HEADS, N).float()
    step = 5
    found = numbers_of(output, output, log_sum_exp, step)
    lanes = found[:, 0].view(BATCH, HEADS, step, -1)
    assert lanes.shape[3] % 4 == 0
    for lane in range(step):
        expected = log_sum_exp[:, :, lane::step]
        assert torch.equal(lanes[:, :, lane, : expected.shape[2]], expected)
        assert (lanes[:, :, lane, expected.shape[2] :] == 0).all()
