import pytest
import torch

from longstride import attend
from longstride.attention import join
from longstride.patterns import Dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_query_without_keys_in_some_part():
    """-inf in one part leaves the other part's result as it is, and -inf in both is a query without keys."""
    outputs = [torch.tensor([[[[5.0], [0.0], [0.0]]]]), torch.tensor([[[[0.0], [7.0], [0.0]]]])]
    lses = [torch.tensor([[[1.0, -torch.inf, -torch.inf]]]), torch.tensor([[[-torch.inf, 2.0, -torch.inf]]])]
    inputs = [x.requires_grad_() for x in (*outputs, *lses)]
    output, lse = join(inputs[:2], inputs[2:])
    assert output.flatten().tolist() == [5, 7, 0]
    assert lse.flatten().tolist() == [1, 2, -torch.inf]
    slopes = torch.autograd.grad(output.sum() + lse[..., :2].sum(), inputs)
    assert all(x.isfinite().all() for x in slopes)
    assert slopes[2].flatten().tolist() == [1, 0, 0]


@pytest.mark.parametrize("other", [0.0, torch.inf, -torch.inf])
def test_an_infinite_lse_is_one_of_the_whole(other):
    """The log-sum-exp of the whole is +inf, and the output NaN, as in attend; other queries are not affected."""
    outputs = [torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1)]
    parts = torch.tensor([[torch.inf, 0.0], [other, 0.0]])
    output, lse = join(outputs, list(parts[:, None, None]))
    assert torch.equal(lse.flatten(), parts.logsumexp(0))
    assert output.flatten().isnan().tolist() == [True, False]
    _, lse = join(outputs, list(torch.tensor([[torch.inf, 0.0], [torch.nan, 0.0]])[:, None, None]))
    assert lse.flatten().isnan().tolist() == [True, False]


def test_lses_far_apart():
    outputs = [torch.full((1, 1, 1, 1), x) for x in (1.0, 2.0, 3.0)]
    output, lse = join(outputs, [torch.full((1, 1, 1), x) for x in (-1e30, 500.0, 500.0)])
    torch.testing.assert_close(output, torch.full((1, 1, 1, 1), 2.5))
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 500 + 2 * 0.5 * torch.log(torch.tensor(2.0)).item()))


def test_the_dtype_is_that_of_the_outputs():
    output, lse = join([torch.ones(1, 1, 2, 3).half()] * 2, [torch.zeros(1, 1, 2)] * 2)
    assert (output.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
def test_two_halves_of_the_keys_are_the_whole(impl):
    """Queries in the second half: the keys of that half, and those before it, one query at a time as the last of them."""
    batch, heads, n, middle, d = 2, 1, 5, 3, 4
    q, k, v = (torch.randn(batch, heads, m, d, device=DEVICE, requires_grad=True) for m in (n - middle, n, n))
    whole = attend(q, k, v, Dense(), impl=impl, return_lse=True)
    near = attend(q, k[:, :, middle:], v[:, :, middle:], Dense(), impl=impl, return_lse=True)
    each = q.transpose(1, 2).flatten(0, 1).unsqueeze(2)  # [batch * queries, heads, 1, d]
    before = [x[:, :, :middle].repeat_interleave(n - middle, 0) for x in (k, v)]
    output, lse = attend(each, *before, Dense(), impl=impl, return_lse=True)
    far = output.view(batch, n - middle, heads, d).transpose(1, 2), lse.view(batch, n - middle, heads).transpose(1, 2)
    joined = join(*zip(near, far))
    torch.testing.assert_close(joined, whole)
    slopes = [torch.randn_like(x) for x in whole]
    ours, theirs = (torch.autograd.grad(results, (q, k, v), slopes, retain_graph=True) for results in (joined, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


X, L = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("outputs", "lses", "says"),
    [
        (X, [L], "outputs must be a list or tuple of tensors"),
        ([], [], r"outputs must be a list or tuple of tensors, got \[\]"),
        ([X], [5], "lses must be a list or tuple of tensors"),
        ([X, X], [L], "outputs has 2 tensors and lses 1; give one lse for each output"),
        ([X, X[:, :1]], [L, L], r"outputs\[1\] has shape \[1, 1, 3, 4\]; .* outputs\[0\] is \[1, 2, 3, 4\]"),
        ([L], [L], r"outputs\[0\] has shape \[1, 2, 3\]"),
        ([X], [X], r"lses\[0\] has shape \[1, 2, 3, 4\]; it must be \[1, 2, 3\]"),
        ([X.long()], [L], r"outputs\[0\] has dtype torch.int64; all must be float64, float32"),
        ([X, X.half()], [L, L], r"outputs\[1\] has dtype torch.float16; all must be .* that of outputs\[0\], torch.float32"),
        ([X], [L.long()], r"lses\[0\] has dtype torch.int64; all must be float32, or float64"),
        ([X], [L.half()], r"lses\[0\] has dtype torch.float16; all must be float32, or float64"),
        ([X, X], [L, L.double()], r"lses\[1\] has dtype torch.float64; all must be float32, or float64"),
        ([X, X.to("meta")], [L, L], r"outputs\[1\] is on meta and lses\[1\] on cpu; all must be on the device of"),
        ([X, X], [L, L.to("meta")], r"outputs\[1\] is on cpu and lses\[1\] on meta; all must be on the device of"),
    ],
)
def test_mistakes_are_named(outputs, lses, says):
    with pytest.raises(ValueError, match=f"join: {says}"):
        join(outputs, lses)
