import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import longstride.attention.chunks as chunks
import longstride.attention.tiles as tiles
from longstride import attend
from longstride.commands.bench.measure import exponent, peak_bytes
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary, fixed, grid, strided, union
from tests.attention.cases import cases, tensors
from tests.attention.error_rule import Ran, assert_within_the_rule

STRIDED, FIXED = union(*strided(6)), union(*fixed(8, 2))


@given(cases(longest_n=700, longest_stride=150))
@settings(max_examples=250)
@example(([Local(96), Column(96)], 2, 2, 500, 16, 32))  # the CIFAR-10 network's heads
@example(([Block(128) | Summary(128, 32, part) for part in range(4)], 1, 4, 400, 8, 8))  # the enwik8 network's
@example((Local(2000), 1, 1, 2500, 4, 4))
@example((Dense(), 1, 1, 1100, 4, 4))
@example((Summary(700, 300), 1, 1, 1500, 4, 4))
@example((Block(600) | Block(250), 1, 1, 1300, 4, 4))
def test_agrees_with_the_oracle(case):
    pattern, *shape = case
    assert_within_the_rule("blocked", *tensors(*shape), pattern)


SIZES = {
    "MIN_ROWS": [1, 3, 16],
    "NARROW_ROWS": [2, 5, 64],
    "WIDE_REACH": [3, 8, 512],
    "MAX_SIDE": [4, 7, 16],
    "TILES_PER_WINDOW": [1, 2, 16],
}


@given(
    cases(),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIZES.items()}),
    st.sampled_from([1, 40, 2**13]),
    st.sampled_from([1, 300, 2**19]),
)
@settings(max_examples=400)
def test_results_do_not_depend_on_tile_sizes(case, sizes, positions, scores):
    """The same with tiles so small that a short sequence has every kind of them."""
    pattern, *shape = case
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(tiles, name, size)
        patch.setattr(chunks, "CPU_BUDGET", chunks.Budget(positions, scores))
        tiles.arrange.cache_clear()
        assert_within_the_rule("blocked", *tensors(*shape), pattern)
    tiles.arrange.cache_clear()


@pytest.mark.slow
@given(cases(longest_n=3000, longest_stride=600))
@settings(max_examples=1500)
def test_agrees_with_the_oracle_at_length(case):
    pattern, *shape = case
    assert_within_the_rule("blocked", *tensors(*shape), pattern)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", [STRIDED, FIXED, Dense(), [Local(5), Summary(7, 3)]], ids=repr)
def test_other_precisions(dtype, pattern):
    assert_within_the_rule("blocked", *tensors(2, 2, 61, 16, 8, dtype), pattern)


def test_scores_far_apart():
    q, k, v, slopes = tensors(1, 1, 80, 8, 8)
    for scale in (0.0, -3.0, 50.0):
        assert_within_the_rule("blocked", q, k, v, slopes, STRIDED, scale)


@pytest.mark.parametrize("pattern", [STRIDED, FIXED, Summary(5, 2), Dilated(3, 7), [Block(4), Column(3)]], ids=repr)
def test_gradcheck(pattern):
    inputs = [torch.randn(1, 2, 17, d, dtype=torch.float64, requires_grad=True) for d in (3, 3, 2)]
    assert gradcheck(lambda q, k, v: attend(q, k, v, pattern, impl="blocked"), inputs)


@pytest.mark.parametrize("impl", ["blocked", "reference"])
@given(cases(longest_n=1500, longest_stride=200), st.sampled_from([1, 100, 1e30]))
@settings(max_examples=80)
@example((Dense(), 1, 1, 1500, 4, 4), 1e30)
@example((Block(128) | Summary(128, 32), 1, 1, 1500, 4, 4), 1e30)
def test_the_future_changes_nothing(impl, case, size):
    """Bit for bit, also where the future is so large that its scores overflow."""
    pattern, *shape = case
    q, k, v, _ = tensors(*shape)
    n = shape[2]
    before = attend(q, k, v, pattern, impl=impl)
    now = int(torch.randint(n, ()))
    for x in (q, k, v):
        x[:, :, now + 1 :] = torch.randn_like(x[:, :, now + 1 :]).abs() * size
    after = attend(q, k, v, pattern, impl=impl)
    assert torch.equal(before[:, :, : now + 1], after[:, :, : now + 1])


def test_patterns_of_one_length_are_kept_apart():
    """A plan that were remembered by length alone would give the second pattern the first one's result."""
    q, k, v, slopes = tensors(1, 1, 50, 4, 4)
    for pattern in (Local(3), Column(3), Block(7), Summary(7, 2), Summary(7, 2, 1), Local(3) | Block(7)):
        assert_within_the_rule("blocked", q, k, v, slopes, pattern)


def test_operators_keep_their_promises():
    q, k, v, slopes = tensors(2, 2, 20, 4, 3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    text = "Local(3) | Column(5), Block(4) | Summary(4, 1)"
    torch.library.opcheck(torch.ops.longstride.blocked_forward.default, (*inputs, text, 0.5, []))
    with torch.no_grad():
        saved = torch.ops.longstride.blocked_forward(*inputs, text, 0.5, [])
        arguments = (slopes, None, *(x.detach() for x in inputs), *saved, text, 0.5, [], [True, False, True])
        torch.library.opcheck(torch.ops.longstride.blocked_backward.default, arguments)


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        (union(*strided(128)), 65_536),
        (union(*grid(2**16, 3)), 65_536),
        (union(*fixed(128, 16)), 16_384),
        (Dense(), 8_192),
        (Column(100) | Block(1000) | Summary(700, 300), 8_192),  # masks that no two tiles share
    ],
    ids=repr,
)
def test_memory_grows_no_faster_than_pairs(pattern, longest):
    lengths, peaks = [2**power for power in range(11, longest.bit_length())], []
    for n in lengths:
        inputs = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]
        slopes = torch.randn(1, 1, n, 16)

        def both(inputs=inputs, slopes=slopes):
            torch.autograd.grad(attend(*inputs, pattern, impl="blocked"), inputs, slopes)

        peaks.append(peak_bytes(both, torch.device("cpu")))
        # Besides the three inputs' gradients and the output: a few chunks, and a few copies of a head.
        assert peaks[-1] < 12 * 4 * n * 16 + 6 * 4 * chunks.CPU_BUDGET.scores
    assert peaks[-1] < 4 * lengths[-1] ** 2 / 8  # far from even an eighth of an n x n matrix
    assert exponent([pattern.pairs(n) for n in lengths], peaks) < 1.1


def test_the_oracles_memory_is_seen_to_grow_with_n_squared():
    """The measure itself: it must tell the oracle's n x n tensors."""
    n = 1024
    inputs = [torch.randn(1, 1, n, 4, requires_grad=True) for _ in range(3)]

    def both():
        attend(*inputs, STRIDED, impl="reference").sum().backward()

    assert peak_bytes(both, torch.device("cpu")) > 4 * n * n


def test_the_proof_of_what_ran_can_fail():
    q, k, v, _ = tensors(1, 1, 8, 2, 2)
    with Ran() as ran:
        attend(q, k, v, STRIDED, impl="reference")
    assert "longstride.blocked_forward" not in ran.ops


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", [STRIDED, FIXED, Dense(), [Local(5), Summary(7, 3)], Block(6) | Block(4)], ids=repr)
def test_on_a_gpu(dtype, pattern):
    for n in (1, 61, 2000):
        assert_within_the_rule("blocked", *(x.cuda() for x in tensors(2, 2, n, 16, 8, dtype)), pattern)
