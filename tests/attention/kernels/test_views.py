"""Documents as batches and as pieces, and heads that share keys in turns: plain calls on views, against an explicit mask."""

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import call, ops, views
from longstride.attention.kernels.launch import forget_plans
from longstride.patterns import Block, Column, Local, Summary
from tests.attention.error_rule import assert_errors_within_the_rule
from tests.attention.layouts import Case, oracle
from tests.attention.plans import tiles_of

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HOPPER = pytest.mark.skipif(
    not (CUDA and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)  # fmt: skip
MERGED = Local(4) | Column(5)
GROUPED = Case([MERGED] * 4, 2, 2, 9, 9, 4, 6, {})
EACH_ITS_OWN = Case([Local(2), Block(6) | Summary(6, 2), MERGED, Local(3), Summary(4, 1), Local(2)], 2, 1, 9, 9, 4, 4, {})
EQUAL = Case([MERGED, Summary(4, 1)], 2, 1, 12, 12, 4, 4, {"documents": (4, 4, 4)})
BOTH = Case([MERGED] * 2 + [Local(3)] * 2, 2, 1, 12, 12, 4, 6, {"documents": (6, 6)})
PIECES = Case([MERGED, Summary(4, 1)], 2, 1, 32, 32, 4, 6, {"documents": (3, 14, 6, 6, 1, 1, 1)})
OF_BATCH = Case([MERGED] * 2, 2, 2, 27, 27, 4, 4, {"documents": (2, 11, 7, 7)})
OF_GROUPS = Case([MERGED] * 2 + [Local(3)] * 2, 2, 1, 28, 28, 4, 4, {"documents": (14, 6, 6, 2)})


@pytest.fixture
def plain_calls(monkeypatch):
    """Heads take turns also in short sequences. Returns the shapes of q in calls, and whether each was plain."""
    seen = []
    monkeypatch.setattr(views, "LEAST_ROWS", 0)
    for name, q_at in (("run_forward", 0), ("run_backward", 2)):
        original = getattr(ops, name)

        def watched(*arguments, original=original, q_at=q_at, name=name):
            q = arguments[q_at] if q_at == 0 else arguments[q_at][0]
            layout = next((x for x in arguments if isinstance(x, call.Layout)), None)
            seen.append((name, tuple(q.shape[:3]), layout is None or not layout.lengths))
            original(*arguments)

        monkeypatch.setattr(ops, name, watched)
    return seen


def calls(count, *shape):
    return [(name, shape, True) for name in ("run_forward", "run_backward") for _ in range(count)]


@pytest.mark.parametrize(
    ("case", "dtype", "expected"),
    [
        (GROUPED, torch.float16, calls(2, 2, 2, 9)),
        (EACH_ITS_OWN, torch.float32, calls(3, 1, 2, 9)),
        (EQUAL, torch.float16, calls(1, 3, 2, 4)),
        (BOTH, torch.float32, calls(2, 2, 2, 6)),
    ],
    ids=["grouped", "each its own", "equal", "both"],
)
def test_plain_calls_agree_with_the_oracle(case, dtype, expected, plain_calls):
    with tiles_of(16, 16):
        case.check("triton", dtype, DEVICE)
    assert plain_calls == expected


@pytest.mark.parametrize(
    ("case", "apart", "dtype", "least", "expected"),
    [
        # Rows of keys, of which a piece has at least so many: 14, then 6 + 6, and small documents around them.
        (PIECES, False, torch.float16, 24, [((1, 2, 3), True), ((1, 2, 14), True), ((2, 2, 6), True), ((3, 2, 1), True)]),
        (PIECES, True, torch.float32, 28, [((1, 2, 3), True), ((1, 2, 14), True), ((1, 2, 15), False)]),
        (PIECES, False, torch.float32, 29, [((1, 2, 32), False)]),
        (OF_BATCH, True, torch.float32, 28, [((2, 2, 2), True), ((2, 2, 11), True), *[((2, 2, 7), True)] * 2]),
        (OF_BATCH, False, torch.float16, 29, [((2, 2, 2), True), ((2, 2, 11), True), ((2, 2, 14), False)]),
        (OF_GROUPS, True, torch.float16, 24, [*[((1, 2, 14), True)] * 2, *[((2, 2, 6), True)] * 2, ((1, 4, 2), True)]),
    ],
    ids=str,
)
def test_pieces_agree_with_the_oracle(case, apart, dtype, least, expected, plain_calls, poisoned, monkeypatch):
    monkeypatch.setattr(views, "LEAST_ROWS", least)
    with tiles_of(16, 16):
        case.check("triton", dtype, DEVICE, of_lse=False, apart=apart)
    assert plain_calls == [(name, *call) for name in ("run_forward", "run_backward") for call in expected]


@pytest.mark.parametrize("least", [0, 24])
def test_a_gradient_of_the_lse_takes_the_kernels_for_documents(least, plain_calls, monkeypatch):
    monkeypatch.setattr(views, "LEAST_ROWS", least)
    with tiles_of(16, 16):
        PIECES.check("triton", torch.float32, DEVICE)
    assert plain_calls[-1] == ("run_backward", (1, 2, 32), False)


@pytest.mark.parametrize(("apart", "dtype"), [(False, torch.float32), (True, torch.float16)])
def test_heads_take_turns_over_documents_of_a_walk(apart, dtype, plain_calls, poisoned, monkeypatch):
    """As on Hopper. Here other kernels compute the documents of each turn."""
    monkeypatch.setattr(ops, "walks_documents", lambda tensors, *_: tensors[0].shape == tensors[1].shape)
    case = OF_GROUPS._replace(heads=[Local(3)] * 4)
    with tiles_of(16, 16):
        case.check("triton", dtype, DEVICE, of_lse=False, apart=apart)
    turns = [((1, 2, 28), False)] * 2  # Heads 0 and 2, which have a head of keys each, then 1 and 3.
    assert plain_calls == [(name, *turn) for name in ("run_forward", "run_backward") for turn in turns]


def test_pieces_do_not_see_each_other(plain_calls, monkeypatch):
    """Not one bit of a piece, or of a document in it, depends on another; nor on the future."""
    monkeypatch.setattr(views, "LEAST_ROWS", 24)
    with tiles_of(16, 16):
        PIECES.check_isolation("triton", torch.float32, DEVICE, [(3, 17), (23, 29), (30, 31)], 10, 1e30)
    assert all(plain for *_, plain in plain_calls)


def test_which_documents_are_pieces(monkeypatch):
    def pieces(documents, shape=(1, 2, 40, 1), queries=40):
        return [tuple(piece) for piece in views.split_documents((*shape[:2], queries, 1), shape, documents)]

    monkeypatch.setattr(views, "LEAST_ROWS", 20)
    assert pieces((12, 1, 5, 5, 9, 8)) == [
        (None, 0, 12, ()),
        (None, 12, 1, ()),
        (None, 13, 10, (5, 5)),
        (None, 23, 17, (9, 8)),
    ]
    assert pieces((12, 28), (2, 2, 40, 1)) == [(None, 0, 12, ()), (None, 12, 28, ())]
    assert pieces((5, 5, 15, 15), (2, 2, 40, 1)) == [
        (0, 0, 10, (5, 5)), (1, 0, 10, (5, 5)), (0, 10, 30, (15, 15)), (1, 10, 30, (15, 15))
    ]  # fmt: skip
    for one_call in ((), (9, 8, 9, 8, 6), (40,), (20, 20)):
        assert pieces(one_call) == []
    assert pieces((30, 10), queries=39) == []  # Fewer queries than keys.
    assert pieces((30, 10, 20, 20), (2, 2, 40, 1)) == []  # Of each row its own.
    monkeypatch.setattr(views, "LEAST_ROWS", 2000)
    assert pieces((30, 10)) == []


def test_a_batch_of_rows_of_documents(plain_calls, monkeypatch):
    """Rows that lie one after the other, as projections make them, fold; of others, each is a call, if it is long."""
    q, k, v = (torch.randn(2, 6, 2, 4, device=DEVICE).transpose(1, 2) for _ in range(3))

    def results(*inputs):
        plain_calls.clear()
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = attend(*leaves, Local(1), impl="triton", documents=[3, 3])
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    with tiles_of(16, 16):
        folded = results(q, k, v)
        assert plain_calls == calls(1, 4, 2, 3)
        assert folded[0].transpose(1, 2).is_contiguous()
        each = results(*(x.contiguous() for x in (q, k, v)))
        assert plain_calls == calls(2, 2, 2, 3)
        monkeypatch.setattr(views, "LEAST_ROWS", 13)
        together = results(*(x.contiguous() for x in (q, k, v)))
    assert plain_calls == [(name, (2, 2, 6), False) for name in ("run_forward", "run_backward")]
    torch.testing.assert_close(folded, together)
    torch.testing.assert_close(each, together)


def test_short_sequences_and_other_layouts_take_one_launch_for_all_heads():
    some = torch.empty(1, 1, 1, 1)
    keys = some.expand(1, 8, views.LEAST_ROWS // 8, 64)
    assert views.turns(some.expand(1, 32, views.LEAST_ROWS // 8, 64), keys) == 4
    assert views.turns(some.expand(1, 32, views.LEAST_ROWS // 8 - 1, 64), keys) == 1
    assert views.turns(some.expand(1, 32, 100, 64), some.expand(1, 8, 100, 64)) == 1
    for documents, count in (((), 0), ((4, 5), 0), ((3, 3), 0), ((3, 3, 3), 3)):
        assert views.equal_documents((1, 1, 9, 1), (1, 1, 9, 1), documents) == count
    assert views.equal_documents((1, 1, 6, 1), (1, 1, 9, 1), (3, 3, 3)) == 0


@pytest.mark.parametrize("case", [BOTH, OF_GROUPS], ids=["equal", "pieces"])
def test_one_gradient_alone(case, plain_calls, poisoned):
    inputs = case.tensors(device=DEVICE)
    with tiles_of(16, 16):
        every = torch.autograd.grad(attend(*inputs, Local(2), impl="triton", **case.options).sum(), inputs)
        for index, leaf in enumerate(inputs):
            others = [x if x is leaf else x.detach() for x in inputs]
            (found,) = torch.autograd.grad(attend(*others, Local(2), impl="triton", **case.options).sum(), leaf)
            assert found.isfinite().all()
            assert torch.equal(found, every[index])


@pytest.mark.parametrize("case", [GROUPED, OF_GROUPS], ids=["grouped", "pieces"])
def test_a_negative_scale(case, plain_calls):
    inputs = case.tensors(device=DEVICE)
    with tiles_of(16, 16):
        output = attend(*inputs, Local(2), scale=-0.3, impl="triton", **case.options)
        ours = torch.autograd.grad(output.sin().sum(), inputs)
    reference = attend(*inputs, Local(2), scale=-0.3, impl="reference", **case.options)
    torch.testing.assert_close(output, reference)
    torch.testing.assert_close(ours, torch.autograd.grad(reference.sin().sum(), inputs))


LONG = {
    "local": Case([Local(128)] * 8, 2, 1, 1000, 1000, 64, 64, {}),
    "merged": Case([Local(16) | Column(16)] * 6, 2, 2, 1000, 1000, 64, 64, {}),
    "fixed": Case([Block(128) | Summary(128, 32)] * 4, 2, 1, 1000, 1000, 64, 64, {}),
    "documents": Case([Local(16) | Column(16)] * 2, 2, 1, 2000, 2000, 64, 64, {"documents": (500,) * 4}),
    "pieces": Case([Local(16) | Column(16)] * 2, 2, 1, 2000, 2000, 64, 64, {"documents": (700, 500, 500, 300)}),
    "both": Case([Local(128)] * 4, 2, 1, 2000, 2000, 64, 64, {"documents": (1000, 1000)}),
}


@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_hopper_kernels_take_them(case, dtype, plain_calls, monkeypatch):
    """With the oracle, also with the gradient of the lse, which takes the general kernels; and without it, by Hopper's."""
    forget_plans()
    case.check("triton", dtype, DEVICE)
    asked = []
    hopper, _ = call.backends(torch.device(DEVICE, torch.cuda.current_device()))
    for name in ("forward", "backward"):
        original = getattr(hopper, name)

        def watched(*arguments, original=original, name=name):
            launches = original(*arguments)
            asked.append((name, bool(launches)))
            return launches

        monkeypatch.setattr(hopper, name, watched)
    forget_plans()
    inputs = case.tensors(dtype, DEVICE)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    slopes = torch.randn(inputs[0].shape, device=DEVICE)

    def results(output, leaves):
        return [output.detach(), *torch.autograd.grad(output, leaves, slopes.to(output.dtype))]

    ours = results(attend(*inputs, case.heads, impl="triton", **case.options), inputs)
    assert {name for name, _ in asked} == {"forward", "backward"}
    assert all(taken for _, taken in asked)
    plain, exact = (results(oracle(*x, case.heads, 0, case.rows)[0], x) for x in (inputs, doubles))
    assert_errors_within_the_rule(("output", "dq", "dk", "dv"), ours, plain, exact)
