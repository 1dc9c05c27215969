"""What TMA would read, checked without a GPU: a descriptor is a shape and strides, as PyTorch's own are."""

import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon._runtime import GluonJITFunction

from longstride.attention.kernels import general
from longstride.attention.kernels.call import Backward
from longstride.attention.kernels.hopper import launch
from longstride.attention.kernels.hopper.chunk_forward import chunk_forward
from longstride.attention.kernels.hopper.lane_backward import lane_backward
from longstride.attention.kernels.hopper.lane_descriptors import lane_descriptor
from longstride.attention.kernels.hopper.lane_forward import lane_forward
from longstride.attention.kernels.hopper.walk_backward import walk_backward
from longstride.attention.kernels.hopper.walk_forward import walk_forward
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


def seen_through(view):
    x = view.tensor
    return x.as_strided(view.shape, view.strides, x.storage_offset() + view.first)


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
    view = launch._cells(x, job)
    assert view.block == (1, 1, 16, 8, D)
    view = seen_through(view)
    assert torch.equal(view, x[:, :, :50].unflatten(2, (2, 25)))


@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize(("lanes", "l"), [(block_lanes, 25), (block_lanes, 20), (column_lanes, 7), (column_lanes, 10)])
def test_sets_of_lanes_hold_every_position_once(lanes, l, layout):
    x = numbered(layout)
    found = [seen_through(lane_descriptor(x, one, (1, 64, x.shape[3]))) for one in lanes(N, l)]
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
    for view in (launch._lanes(x, 4, 64), lane_descriptor(x, block_lanes(N, 20)[0], (1, 64, x.shape[3]))):
        assert all(stride * 2 % 16 == 0 for stride in view.strides[:-1])


def row_stats_of(d_output, output, lse, step=1):
    x = output
    call = Backward(x, x, x, d_output, output, lse, x, x, x, 1.0, 1.0, True, True, Workspace(x.device))
    row_stats = launch._new_row_stats(call, step)
    launch._fill_row_stats(call, row_stats, step).through_triton([])
    return row_stats


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_row_stats_of_every_query():
    d_output, output = torch.randn(2, BATCH, HEADS, N + 1, D)
    lse = torch.randn(BATCH, HEADS, N + 1)
    lse[0, 1, 3] = -torch.inf
    found = row_stats_of(d_output.transpose(1, 2).contiguous().transpose(1, 2), output, lse)
    assert found.shape == (BATCH * HEADS, 2, N + 4)
    expected = lse.masked_fill(lse == -torch.inf, torch.inf)
    assert torch.equal(found[:, 0, : N + 1].view(BATCH, HEADS, N + 1), expected)
    torch.testing.assert_close(found[:, 1, : N + 1].view(BATCH, HEADS, N + 1), (d_output * output).sum(-1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_row_stats_lane_by_lane():
    output = torch.ones(BATCH, HEADS, N, D)
    lse = torch.arange(BATCH * HEADS * N).view(BATCH, HEADS, N).float()
    step = 5
    found = row_stats_of(output, output, lse, step)
    lanes = found[:, 0].view(BATCH, HEADS, step, -1)
    assert lanes.shape[3] % 4 == 0
    for lane in range(step):
        expected = lse[:, :, lane::step]
        assert torch.equal(lanes[:, :, lane, : expected.shape[2]], expected)
        assert (lanes[:, :, lane, expected.shape[2] :] == 0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("layout", ["together", "apart"])
def test_parts_of_gradients_are_added_to_the_cells(layout):
    """Two of three blocks have cells that later blocks see."""
    (one,) = passes(notation.write(notation.parse("block(20)|summary(20, 4, 0), block(20)|summary(20, 4, 1)")), N)
    blocks, splits, d = 3, 5, 24
    gradient = torch.randn(BATCH, 2, N, d)
    gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2) if layout == "apart" else gradient
    parts = torch.randn(BATCH, 2, (blocks - 1) * 4, splits * d)
    expected = gradient.clone()
    for head, job in enumerate(one.jobs):
        cells = expected[:, head].unflatten(1, (blocks, 20))[:, :-1, job.first_cell : job.first_cell + 4]
        cells += parts[:, head].view(BATCH, blocks - 1, 4, splits, d).sum(3)
    launch._sum_parts(parts, gradient, one, splits).through_triton([])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("items", "n", "splits"),
    [
        (64, 1_048_576, 9),
        (1, 1_048_576, 512),
        (6, 12_288, 6),
        (197, 1_048_576, 3),
        (198, 1_048_576, 1),  # The order of the items is enough.
        (6, 4095, 1),  # So few queries are not worth it.
    ],
)
def test_how_many_items_share_the_queries_of_a_tile(items, n, splits):
    assert launch._splits(items, n, 132) == splits


KERNELS = [
    launch.window_forward, launch.past_forward, launch.hopper_dq, launch.hopper_dkv, walk_forward, walk_backward,
    lane_forward, lane_backward, chunk_forward,
]  # fmt: skip


GENERAL_KERNELS = [
    general.forward_kernel,
    general.backward_dq,
    general.backward_dkv,
    general.lane_forward,
    general.lane_backward,
]


@pytest.mark.parametrize("kernel", KERNELS + GENERAL_KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_a_kernel_takes_few_parameters(kernel):
    """What belongs together is one argument. Eight of lane_backward's are tensor descriptors, which cannot be grouped."""
    assert len(kernel.arg_names) <= (15 if kernel in KERNELS else 13)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_so_do_the_functions_beside_it(kernel):
    functions = [x for x in vars(sys.modules[kernel.fn.__module__]).values() if isinstance(x, GluonJITFunction)]
    assert kernel in functions
    assert max(len(function.arg_names) for function in functions if function not in KERNELS) <= 13
