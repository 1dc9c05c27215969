"""Every kernel against the oracle: in Triton's interpreter without a GPU, and on one where there is one."""

import gc
import threading
import weakref
from contextlib import nullcontext
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels import launch, ops  # noqa: F401 - ops registers the operators
from longstride.attention.kernels.hopper.choice import SHORT_LANE, choose, fits_tma
from longstride.attention.kernels.jobs import passes
from longstride.attention.kernels.launch import Launch, _plans, forget_plans
from longstride.attention.kernels.run import run_forward
from longstride.attention.kernels.settings import Gpu, gpu, lane_setting
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary, fixed, grid, notation, strided, union
from tests.attention.cases import cases, tensors
from tests.attention.error_rule import assert_within_the_rule, results
from tests.attention.plans import patched, tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # The interpreter is silently wrong for bfloat16.
STRIDED, FIXED = union(*strided(12)), union(*fixed(32, 8))
KINDS = [
    Dense(),
    Local(20),
    Column(7),
    Dilated(3, 30),
    Block(40),
    Block(5),
    Summary(40, 8),
    Summary(8, 2, 1),
    STRIDED,
    FIXED,
    union(*fixed(16, 4)),
    union(*grid(300, 3)),
    Column(4) | Column(6),
    Local(9) | Block(11) | Summary(11, 3),
]


def on_device(*shape, dtype=torch.float32):
    return [x.to(DEVICE) for x in tensors(*shape, dtype=dtype)]


@given(
    cases(longest_n=90),
    st.sampled_from([16, 32]),
    st.sampled_from([16, 32]),
    st.sampled_from([torch.float32, HALF]),
)
@settings(max_examples=25)
@example(([Local(9), Column(9)], 2, 2, 70, 8, 9), 16, 16, torch.float32)
@example(([Block(12) | Summary(12, 3, part) for part in range(3)], 1, 3, 90, 4, 4), 16, 16, torch.float32)
def test_agrees_with_the_oracle(case, rows, columns, dtype):
    """With tiles so small that a short sequence has every kind of them."""
    pattern, *shape = case
    with tiles_of(rows, columns):
        assert_within_the_rule("triton", *on_device(*shape, dtype=dtype), pattern)


@pytest.mark.slow
@given(cases(longest_n=200, longest_stride=60), st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))
@settings(max_examples=300)
def test_agrees_with_the_oracle_at_length(case, rows, columns):
    pattern, *shape = case
    with tiles_of(rows, columns):
        assert_within_the_rule("triton", *on_device(*shape), pattern)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("pattern", KINDS, ids=repr)
def test_with_the_settings_that_ship(pattern, dtype):
    for n in (1, 130, 257) if DEVICE == "cuda" or dtype == torch.float32 else (1, 130):
        assert_within_the_rule("triton", *on_device(1, 2, n, 16, 24, dtype=dtype), pattern)


@pytest.mark.parametrize("pattern", [Column(20), Local(3) | Column(20), [Column(30), Block(4)]], ids=repr)
def test_short_lanes_share_a_tile(pattern):
    setting = lane_setting("lane_forward", False, 16, 16, HALF, 8, gpu(torch.device(DEVICE)))
    assert setting is not None
    assert setting.rows > 8
    assert_within_the_rule("triton", *on_device(1, 2, 150, 16, 16, dtype=HALF), pattern)


@pytest.mark.parametrize(
    ("pattern", "n", "d_qk", "d_v"),
    [
        (Column(20), 150, 64, 64),
        (Local(20) | Column(20), 80, 32, 32),
        (Local(15) | Column(15), 59, 64, 128),
        (Local(12) | Column(6), 90, 64, 64),
        (Local(20) | Column(20), 50, 128, 128),
        (Dilated(10, 30), 77, 64, 64),
        (Local(20) | Column(20), 40, 64, 64),
        (Local(20) | Column(20), 17, 64, 64),
    ],
    ids=str,
)
@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter: a GPU may take other kernels for windows")
def test_short_lanes_that_hopper_leaves_to_the_general_kernels(pattern, n, d_qk, d_v, monkeypatch):
    """The kernels of whole lanes take every pass that has a pair, and no launch has the others."""
    ran = []
    run = Launch.through_triton
    monkeypatch.setattr(Launch, "through_triton", lambda self, x: (ran.append(self.kernel.__name__), run(self, x))[1])
    forget_plans()
    assert_within_the_rule("triton", *on_device(2, 2, n, d_qk, d_v, dtype=HALF), pattern)
    forget_plans()
    found = [one for one in passes(notation.write([pattern] * 2), n) if not one.empty]
    assert ran == ["lane_forward"] * len(found) + ["lane_backward"] * len(found)
    for index, one in enumerate(found):
        if one.jobs[0].lanes > 1:
            assert one.longest <= SHORT_LANE
            assert {choose(one, backward, index > 0, 2, n, d_qk, d_v) for backward in (False, True)} == {None}


@pytest.mark.parametrize(("d_qk", "d_v"), [(80, 96), (64, 128), (256, 16), (1, 3), (40, 256)])
def test_head_dimensions(d_qk, d_v):
    for dtype in (torch.float32, HALF):
        assert_within_the_rule("triton", *on_device(1, 1, 70, d_qk, d_v, dtype=dtype), FIXED)


def test_scores_far_apart():
    for scale in (0.0, -3.0, 50.0):
        assert_within_the_rule("triton", *on_device(1, 1, 80, 8, 8), STRIDED, scale)


@given(cases(longest_n=90), st.sampled_from([1, 1e30]))
@settings(max_examples=15)
def test_the_future_changes_nothing(case, size):
    pattern, *shape = case
    q, k, v, _ = on_device(*shape)
    before = attend(q, k, v, pattern, impl="triton")
    now = int(torch.randint(shape[2], ()))
    for x in (q, k, v):
        x[:, :, now + 1 :] = torch.randn_like(x[:, :, now + 1 :]).abs() * size
    after = attend(q, k, v, pattern, impl="triton")
    assert torch.equal(before[:, :, : now + 1], after[:, :, : now + 1])


def test_results_have_the_layout_of_the_inputs():
    """What comes as [batch, n, heads, d] goes back so, and nothing is copied on the way."""
    inputs = [torch.randn(2, 20, 3, 4, device=DEVICE).transpose(1, 2).requires_grad_() for _ in range(3)]
    output = attend(*inputs, STRIDED, impl="triton")
    for x in (output, *torch.autograd.grad(output.sum(), inputs)):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("pattern", [Local(5), union(*fixed(16, 2)), Block(16)], ids=repr)
def test_heads_that_lie_far_apart(pattern):
    """Head 2 begins 2 ** 31 numbers behind head 0. Memory that is never touched costs nothing."""
    memory = torch.empty(2**31 + 40 * 16, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((1, 3, 40, 16), (1, 2**30, 16, 1))
    x.copy_(torch.randn(1, 3, 40, 16))
    near = x.contiguous()
    far = results("triton", x, x, x, near, pattern)
    assert all(torch.equal(a, b) for a, b in zip(far, results("triton", near, near, near, near, pattern)))
    inputs = [x.detach().requires_grad_() for _ in range(3)]
    output = attend(*inputs, pattern, impl="triton")
    assert torch.equal(output, far[0])
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(output, inputs, near), far[1:]))


def test_a_gpu_with_little_shared_memory_computes_windows():
    data = on_device(1, 2, 70, 16, 16, dtype=torch.float16)
    with patched(gpu=lambda device: Gpu("a small GPU", 99 * 2**10), lane_forward=None, lane_backward=None):
        assert_within_the_rule("triton", *data, Block(32))


def test_a_plan_is_kept_and_tells_its_tensors_apart():
    """One tensor for q, k and v first, and then three, with the plan that was made for it."""
    q, k, v, _ = on_device(1, 2, 70, 16, 16)
    forget_plans()
    attend(q, q, q, Local(5), impl="triton")
    plans = dict(_plans)
    output = attend(q, k, v, Local(5), impl="triton")
    assert _plans == plans
    torch.testing.assert_close(output, attend(q, k, v, Local(5), impl="reference"))


def test_tensors_that_begin_elsewhere_get_another_plan():
    """TMA reads matrices at multiples of 16 bytes only. The lse, which may be a part of a longer one, may be anywhere."""

    def at(first, *shape, dtype):
        return torch.zeros(prod(shape) + first, dtype=dtype, device=DEVICE)[first:].view(shape)

    forget_plans()
    taken = []
    for first_q, first_lse in ((0, 0), (0, 1), (1, 0), (8, 4)):
        q, k, v, output = (at(first, 1, 1, 20, 16, dtype=torch.float16) for first in (first_q, 0, 0, 0))
        run_forward(q, k, v, output, at(first_lse, 1, 1, 20, dtype=torch.float32), "Local(3)", 0.25)
        taken.append((fits_tma(q, k, v, output), len(_plans)))
    assert taken == [(True, 1), (True, 2), (False, 3), (True, 3)]


def laid_out(x, order, gaps):
    """The same numbers, with their dimensions in this order in memory, and gaps between them or not."""
    x = x.permute(order).contiguous()
    return (torch.stack((x, x), -1)[..., 0] if gaps else x).permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_results_with_another_layout_get_another_plan(scale):
    """Inputs whose rows are not contiguous are copied, and look alike then. Their results keep the order of the inputs."""
    data = on_device(1, 3, 20, 8, 8)
    heads_first, heads_later, columns = ((0, 1, 2, 3), True), ((0, 2, 1, 3), True), ((0, 1, 3, 2), False)
    forget_plans()
    found = []
    for of_q_and_k, of_v in (
        (heads_first, heads_first), (heads_later, heads_later), (heads_later, heads_first), (columns, columns),
        (heads_first, heads_first),
    ):  # fmt: skip
        q, k, v, slopes = (laid_out(x, *layout) for x, layout in zip(data, (of_q_and_k, of_q_and_k, of_v, of_v)))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        output = attend(*inputs, Local(5) | Column(7), scale=scale, impl="triton")
        found.append([output, *torch.autograd.grad(output, inputs, slopes)])
    assert found[0][0].stride() != found[1][0].stride()
    for later in found[1:]:
        for ours, first in zip(later, found[0]):
            torch.testing.assert_close(ours, first)


def test_the_first_run_of_a_plan_keeps_no_tensors():
    """Not even until the next garbage collection: they may be gigabytes."""
    forget_plans()
    q, k, v, _ = (x.requires_grad_() for x in on_device(1, 2, 40, 8, 8))
    gc.collect()
    gc.disable()
    try:
        output = attend(q, k, v, Local(3), impl="triton")
        output.sum().backward()
        seen = [weakref.ref(x) for x in (q, k, v, output)]
        del q, k, v, output
        assert [one() for one in seen] == [None] * 4
    finally:
        gc.enable()


def test_plans_are_dropped_when_there_are_many(monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 2)
    q, k, v, _ = on_device(1, 2, 70, 16, 16)
    forget_plans()
    for reach in (1, 2, 3, 1):
        torch.testing.assert_close(
            attend(q, k, v, Local(reach), impl="triton"), attend(q, k, v, Local(reach), impl="reference")
        )
        assert len(_plans) <= 2


def test_plans_are_dropped_when_their_tables_are_large(monkeypatch):
    """Documents of other lengths have another plan, with tables of its own."""
    q, k, v, _ = on_device(1, 2, 70, 16, 16)
    forget_plans()
    for first in range(1, 9):
        documents = [first, 10, 60 - first]
        found = attend(q, k, v, Local(3), impl="triton", documents=documents)
        torch.testing.assert_close(found, attend(q, k, v, Local(3), impl="reference", documents=documents))
        if first == 2:
            size = sum(plan.table_bytes for plan in _plans.values())
            assert size >= 4 * sum(2 * [len(documents)])
            monkeypatch.setattr(launch, "MOST_TABLE_BYTES", size)
        assert len(_plans) == min(first, 2)


def test_a_plan_may_be_made_while_another_thread_drops_one(monkeypatch):
    made = SimpleNamespace(table_bytes=0)

    class Plans(dict):
        def __iter__(self):
            """Stops between the choice of the oldest plan and its removal."""
            oldest = super().__iter__()
            if threading.current_thread() is threading.main_thread():
                other.start()
                other.join(0.1)  # It waits for this thread.
            return oldest

    other = threading.Thread(target=launch.plan_for, args=("other", lambda: made))
    monkeypatch.setattr(launch, "_plans", Plans(first=made))
    monkeypatch.setattr(launch, "MOST_PLANS", 1)
    assert launch.plan_for("second", lambda: made) is made
    other.join()
    assert set(launch._plans.keys()) == {"other"}


def test_saved_tensors_may_come_back_with_other_strides():
    """As from a hook that keeps them elsewhere."""
    q, k, v, slopes = on_device(2, 2, 40, 8, 8)
    found = []
    for hooks in (False, True):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        other_order = torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.transpose(-1, -2).contiguous(), lambda x: x.transpose(-1, -2)
        )
        with other_order if hooks else nullcontext():
            output = attend(*inputs, Local(4), impl="triton")
        found.append(torch.autograd.grad(output, inputs, slopes))
    torch.testing.assert_close(found[1], found[0])


def test_operators_keep_their_promises():
    q, k, v, slopes = on_device(2, 2, 20, 4, 3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    text = "Local(3) | Column(5), Block(4) | Summary(4, 1)"
    torch.library.opcheck(torch.ops.longstride.triton_forward.default, (*inputs, text, 0.5, []))
    with torch.no_grad():
        saved = torch.ops.longstride.triton_forward(*inputs, text, 0.5, [])
        arguments = (slopes, None, *(x.detach() for x in inputs), *saved, text, 0.5, [], [True, False, True])
        torch.library.opcheck(torch.ops.longstride.triton_backward.default, arguments)


@pytest.mark.parametrize("text", ["Local(3)", "Local(3), Local(3), Local(3)"])
@pytest.mark.parametrize("impl", ["blocked", "triton"])
def test_operators_want_one_pattern_for_each_head(impl, text):
    q, k, v, slopes = on_device(1, 2, 20, 4, 4)
    library = torch.ops.longstride
    forward, backward = getattr(library, f"{impl}_forward"), getattr(library, f"{impl}_backward")
    says = r"has \d patterns for 2 heads; write one for each head"
    with pytest.raises(ValueError, match=says):
        forward(q, k, v, text, 0.5, [])
    with pytest.raises(ValueError, match=says):
        forward(q[:, :, 5:], k, v, text, 0.5, [])
    saved = forward(q, k, v, "Local(3), Local(3)", 0.5, [])
    with pytest.raises(ValueError, match=says):
        backward(slopes, None, q, k, v, *saved, text, 0.5, [], [True] * 3)


def test_flops_are_counted_by_pairs():
    q, k, v = (torch.randn(2, 3, 50, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    pairs = sum(pattern.pairs(50) for pattern in (STRIDED, FIXED, Dense()))
    with FlopCounterMode(display=False) as counter:
        output = attend(q, k, v, [STRIDED, FIXED, Dense()], impl="triton")
        assert counter.get_total_flops() == 2 * 2 * pairs * (8 + 8)
        output.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * pairs * 7 * 8


def test_selective_checkpointing_can_keep_the_op():
    q, k, v = (x.requires_grad_() for x in on_device(1, 1, 20, 4, 4)[:3])
    runs = []

    def policy(context, op, *arguments, **options):
        keep = op == torch.ops.longstride.triton_forward.default
        if keep:
            runs.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def call(q, k, v):
        return attend(q.sin(), k, v, FIXED, impl="triton").square()

    expected = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    output = checkpoint(call, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    actual = torch.autograd.grad(output.sum(), (q, k, v))
    assert runs[0] is False
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((1, 1, 4, 512, 8), torch.float32, "take d_qk up to 256, got 512; impl = 'blocked' takes it"),
        ((1, 1, 4, 8, 300), torch.float32, "take d_v up to 256, got 300"),
        ((1, 1, 4, 8, 8), torch.float64, "take float16, bfloat16 and float32, got torch.float64"),
    ],
)
def test_what_is_not_supported_is_refused(shape, dtype, says):
    q, k, v, _ = on_device(*shape, dtype=dtype)
    with pytest.raises(ValueError, match=says):
        attend(q, k, v, STRIDED, impl="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
def test_the_interpreter_is_not_trusted_with_bfloat16():
    q, k, v, _ = on_device(1, 1, 4, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="wrong for bfloat16"):
        attend(q, k, v, STRIDED, impl="triton")


GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
PAPER = [*strided(128), *fixed(128, 32), union(*strided(128)), union(*fixed(128, 32)), union(*fixed(96, 8))]


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", [*PAPER, Dense(), union(*grid(4096, 3))], ids=repr)
def test_on_a_gpu(pattern, dtype):
    for n, d_qk, d_v in ((1537, 64, 64), (3072, 64, 128), (1000, 32, 32), (500, 96, 80), (300, 256, 256)):
        assert_within_the_rule("triton", *on_device(2, 2, n, d_qk, d_v, dtype=dtype), pattern)


@GPU
@pytest.mark.parametrize("pattern", PAPER, ids=repr)
def test_the_same_bits_every_time(pattern):
    data = on_device(2, 4, 3000, 64, 64, dtype=torch.bfloat16)
    first = results("triton", *data, pattern)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(first, results("triton", *data, pattern)))


@GPU
@pytest.mark.parametrize("pattern", [union(*strided(1024)), union(*fixed(1024, 8))], ids=repr)
def test_a_million_positions(pattern):
    """Against the oracle at some queries, and for gradients through what those alone send back."""
    n, d = 1_048_576, 64
    q, k, v = (torch.randn(1, 1, n, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    some = torch.randint(n, (24,), device=DEVICE).sort().values
    output = attend(q, k, v, pattern, impl="triton")
    slopes = torch.zeros_like(output)
    slopes[:, :, some] = torch.randn(1, 1, 24, d, device=DEVICE, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(output, (q, k, v), slopes)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    seen = pattern.sees(some[:, None], torch.arange(n, device=DEVICE)[None, :])
    scores = (exact[0][0, 0, some] @ exact[1][0, 0].T / d**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ exact[2][0, 0]
    true = torch.autograd.grad(expected, exact, slopes[0, 0, some].double())
    for ours, theirs in zip([output[0, 0, some], *gradients], [expected, *true]):
        assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm()
