"""Walks over documents of any lengths: on a CPU emulated, with an explicit mask beside them; on a Hopper GPU as they are."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import launch
from longstride.attention.kernels.call import Layout
from longstride.attention.kernels.hopper import choice
from longstride.attention.kernels.hopper import launch as hopper
from longstride.attention.kernels.jobs import passes
from longstride.attention.kernels.work import WalkTile, document_table, walk_tiles
from longstride.patterns import Column, Local
from tests.attention.kernels.hopper.emulated_call import Call
from tests.attention.layouts import Case

HOPPER = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")
EDGES = [1, 63, 64, 65, 127, 128, 129]
"""Lengths around one and two tiles."""
LENGTHS = [*EDGES, 3100, 30, 200]
N = sum(LENGTHS)


def table(rows, heads=1, back=2):
    lengths = rows[0] if len(rows) == 1 else [length for row in rows for length in row]
    shape = len(rows), heads, sum(rows[0]), 64
    return [WalkTile(*tile) for tile in walk_tiles(document_table(shape, shape, lengths), 64, back).tolist()]


def test_the_tiles_of_a_walk():
    before = WalkTile(0, -2, -64, 0), WalkTile(0, -1, -64, 0)
    assert table([[65, 64, 1]]) == [
        *before, WalkTile(0, 0, 0, 64), WalkTile(0, 1, 64, 1), *before, WalkTile(0, 0, 65, 64), *before,
        WalkTile(0, 0, 129, 1),
    ]  # fmt: skip
    assert [tile.batch for tile in table([[3, 1], [2, 2]], back=1)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("back", [1, 2])
def test_tiles_hold_every_position_once(back):
    found = table([LENGTHS], back=back)
    held = [tile.first + row for tile in found for row in range(tile.rows)]
    assert held == list(range(N))
    assert sum(not tile.rows for tile in found) == back * len(LENGTHS)


@pytest.mark.parametrize(("longest", "reach"), [(1, 64), (64, 64), (65, 128), (100, 128), (3000, 100)])
def test_kernels_are_not_compiled_for_each_longest_document(longest, reach):
    job = passes("local(100)", longest)[0].jobs[0]
    assert hopper._reach(SimpleNamespace(layout=Layout((longest, 1))), job) == reach
    assert hopper._reach(SimpleNamespace(layout=None), job) == min(100, longest)


@ON_CPU
@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize(
    ("reach", "rows", "heads", "d_qk", "d_v", "apart", "programs"),
    [
        (128, [[300]], 2, 32, 32, False, 3),  # One sequence, for which there is no table.
        (128, [EDGES], 1, 32, 32, False, 4),
        (100, [EDGES[::-1]], 2, 32, 32, True, 1),
        (64, [[130, 1, 64, 5]] * 2, 1, 32, 32, False, 9),
        (40, [[200], [63, 137]], 2, 32, 32, False, 5),
        (128, [[65, 129, 70]], 1, 64, 128, True, 3),
        (7, [[3, 1, 1, 2]], 1, 64, 128, False, 8),  # As many programs as tiles, and those between documents.
    ],
)
def test_emulated_walks_agree_with_the_oracle(reach, rows, heads, d_qk, d_v, apart, programs, late):
    call = Call(f"local({reach})", rows, heads, d_qk, d_v, apart)
    for ours, theirs in zip(call.run(call.inputs, programs, late), call.expected()):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert call.kernels == ["walk_forward", "walk_backward"]


@ON_CPU
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("reach", "d_qk", "d_v"), [(128, 32, 32), (40, 64, 128)])
def test_emulated_walks_keep_documents_apart(reach, d_qk, d_v, value):
    """A program begins at each of the tiles."""
    call = Call(f"local({reach})", [[65, 70, 1, 129]], 1, d_qk, d_v)
    before = call.run(call.inputs, 8)
    for start, end in ((0, 65), (65, 135), (135, 136), (136, 265)):
        other = [x.clone() for x in call.inputs]
        for x in other:
            x[:, :, start:end] = value
        for ours, theirs in zip(call.run(other, 8), before):
            for part in (slice(0, start), slice(end, None)):
                assert torch.equal(ours[:, :, part], theirs[:, :, part])


@pytest.fixture
def walked(monkeypatch):
    """For each launch that Hopper's backend makes, the kernel and whether it is for documents. Documents of any length
    walk, also those that other kernels compute faster. Memory begins as NaN."""
    found = []
    monkeypatch.setattr(choice, "LEAST_DOCUMENT", 1)
    for name in ("forward", "backward"):
        original = getattr(hopper, name)

        def watched(*arguments, original=original):
            launches = original(*arguments)
            found.extend(
                (one.kernel.fn.__name__, "WALK" in one.constants and one.constants["WALK"].documents.value)
                for one in launches or ()
            )
            return launches

        monkeypatch.setattr(hopper, name, watched)
    launch.forget_plans()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield found
    torch.use_deterministic_algorithms(False)


BOTH = [("walk_forward", True), ("walk_backward", True)]


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("d_qk", "d_v"), [(32, 32), (64, 64), (64, 128)])
def test_documents_of_all_lengths(d_qk, d_v, dtype, walked):
    case = Case([Local(128)] * 2, 2, 1, N, N, d_qk, d_v, {"documents": LENGTHS})
    case.check("triton", dtype, "cuda", of_lse=False, apart=dtype == torch.float16)
    assert walked == BOTH


SHORT = [1 + index * 37 % 70 for index in range(70)]
NUMBERS = torch.arange(1000).div(torch.tensor([[170], [333]]), rounding_mode="floor")
OTHERS = {
    "one tile back": Case([Local(40)] * 3, 3, 2, 516, 516, 64, 64, {"documents": [*EDGES[:-2], 196]}),
    "of rows": Case([Local(128)] * 2, 2, 2, 1000, 1000, 64, 64, {"documents": NUMBERS}),
    "short": Case([Local(128)] * 8, 8, 1, sum(SHORT), sum(SHORT), 64, 64, {"documents": SHORT}),
    "one head": Case([Local(128)], 1, 1, 80, 80, 64, 64, {"documents": [17, 63]}),
}


@HOPPER
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_documents(case, apart, walked):
    case.check("triton", torch.bfloat16, "cuda", of_lse=False, apart=apart)
    assert walked == BOTH


@HOPPER
def test_merged_with_column(walked):
    """The general kernels add the columns of documents."""
    case = Case([Local(16) | Column(16)] * 2, 2, 1, N, N, 64, 64, {"documents": LENGTHS})
    case.check("triton", torch.bfloat16, "cuda", of_lse=False)
    assert walked == BOTH


def all_results(q, k, v, slopes, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output, lse = attend(*leaves, Local(128), impl="triton", return_lse=True, **options)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, slopes)]


@HOPPER
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("d_qk", "d_v"), [(32, 32), (64, 64), (64, 128)])
def test_no_bit_of_a_document_depends_on_another(d_qk, d_v, value, walked):
    inputs = [torch.randn(1, 2, N, d, device="cuda", dtype=torch.bfloat16) for d in (d_qk, d_qk, d_v, d_v)]
    before = all_results(*inputs, documents=LENGTHS)
    assert all(x.isfinite().all() for x in before)
    start = 0
    for length in LENGTHS:
        end = start + length
        other = [x.clone() for x in inputs]
        for x in other:
            x[:, :, start:end] = value
        for ours, theirs in zip(all_results(*other, documents=LENGTHS), before):
            for part in (slice(0, start), slice(end, None)):
                assert torch.equal(ours[:, :, part], theirs[:, :, part])
        start = end
    assert walked == BOTH
    assert all(plan.ready for plan in launch._plans.values())  # The CUDA driver launches, not Triton.


@HOPPER
def test_inputs_in_one_tensor(walked):
    """q, k and v as one projection makes them; the rows of a batch have other documents each."""
    shape = 2, 1000, 3, 4, 64
    packed = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    slopes = torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16)
    views = [x.transpose(1, 2) for x in packed.unbind(2)]
    copies = [x.contiguous() for x in views]
    for ours, theirs in zip(all_results(*views, slopes, documents=NUMBERS), all_results(*copies, slopes, documents=NUMBERS)):
        assert torch.equal(ours, theirs)
    assert walked == BOTH * 2
