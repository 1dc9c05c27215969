import numpy as np
import pytest
import torch

from longstride import attend
from longstride.attention.implementation import choose
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary
from tests.attention.error_rule import Ran, results

PATTERN = Local(4) | Column(5)
ALL = pytest.mark.parametrize("impl", ["blocked", "reference", "triton"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(batch=2, heads=3, n=23, d_qk=4, d_v=6, device=DEVICE):
    return [torch.randn(batch, heads, n, d, device=device) for d in (d_qk, d_qk, d_v)]


def test_auto_is_blocked_on_a_cpu():
    q, k, v = tensors(device="cpu")
    with Ran() as ran:
        output = attend(q, k, v, PATTERN)
    assert "longstride.blocked_forward" in ran.ops
    assert output.shape == v.shape
    assert torch.equal(output, attend(q, k, v, PATTERN, impl="blocked"))
    assert choose("auto", q.device).impl == "blocked"


@ALL
def test_one_pattern_for_each_head(impl):
    q, k, v = tensors()
    heads = (Local(4), Block(5) | Summary(5, 2), Dense())
    together = attend(q, k, v, heads, impl=impl)
    for head, pattern in enumerate(heads):
        one = slice(head, head + 1)
        alone = attend(q[:, one], k[:, one], v[:, one], pattern, impl=impl)
        torch.testing.assert_close(together[:, one], alone)


@ALL
def test_the_scale_is_one_over_the_root_of_d_qk(impl):
    q, k, v = tensors(d_qk=16)
    assert torch.equal(attend(q, k, v, PATTERN, impl=impl), attend(q, k, v, PATTERN, scale=0.25, impl=impl))
    assert not torch.allclose(attend(q, k, v, PATTERN, impl=impl), attend(q, k, v, PATTERN, scale=1, impl=impl))


@ALL
def test_inputs_as_the_projections_leave_them(impl):
    """[batch, n, heads, d] transposed, and other views, give the same as copies of them; none is changed."""
    views = [torch.randn(2, 23, 3, d, device=DEVICE).transpose(1, 2) for d in (4, 4, 6)]
    views[1] = torch.randn(2, 3, 4, 23, device=DEVICE).transpose(2, 3)
    kept = [x.clone() for x in views]
    slopes = torch.randn(2, 23, 3, 6, device=DEVICE).transpose(1, 2)
    expected = results(impl, *kept, slopes.contiguous(), PATTERN)
    inputs = [x.detach().requires_grad_() for x in views]
    output = attend(*inputs, PATTERN, impl=impl)
    for ours, theirs in zip([output, *torch.autograd.grad(output, inputs, slopes)], expected):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(x, y) for x, y in zip(views, kept))


@ALL
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("negated", [lambda x: torch._neg_view(-x), lambda x: torch.complex(x, -x).conj().imag])
def test_numbers_that_lie_negated_in_memory(impl, negated, which):
    """In q, k, v or the incoming gradient."""
    data = [*tensors(), torch.randn(2, 3, 23, 6, device=DEVICE)]
    expected = results(impl, *data, PATTERN)
    data[which] = negated(data[which])
    assert data[which].is_neg()
    inputs = [x.detach().requires_grad_() for x in data[:3]]
    output = attend(*inputs, PATTERN, impl=impl)
    without_gradient = attend(*data[:3], PATTERN, impl=impl)
    for ours, theirs in zip([output, *torch.autograd.grad(output, inputs, data[3])], expected):
        assert torch.equal(ours, theirs)
    assert torch.equal(without_gradient, output)


@ALL
def test_on_the_meta_device_only_shapes_are_computed(impl, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = [x.requires_grad_() for x in tensors(device="meta")]
    assert attend(*(x.detach() for x in inputs), PATTERN, impl=impl).shape == (2, 3, 23, 6)
    output = attend(*inputs, PATTERN, impl=impl)
    assert [x.shape for x in torch.autograd.grad(output.sum(), inputs)] == [x.shape for x in inputs]


@ALL
def test_a_gradient_that_is_expanded(impl):
    inputs = [x.requires_grad_() for x in tensors()]
    output = attend(*inputs, PATTERN, impl=impl)
    expanded = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    for ours, theirs in zip(expanded, torch.autograd.grad(output, inputs, torch.ones_like(output))):
        assert torch.equal(ours, theirs)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_picks_the_regions_dtype(impl, dtype):
    if impl == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter is wrong for bfloat16")
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.autocast(DEVICE, dtype=dtype):
        output = attend(q, k.bfloat16(), v, PATTERN, impl=impl)  # as a linear layer and a norm may leave them
    assert output.dtype == dtype
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    low = [x.detach().to(dtype) for x in (q, k.bfloat16(), v)]
    assert torch.equal(output, attend(*low, PATTERN, impl=impl))
    if impl == "triton":
        return  # It has no float64.
    with torch.autocast(DEVICE, dtype=dtype):
        assert attend(*(x.double() for x in (q, k, v)), PATTERN, impl=impl).dtype == torch.float64


def test_autocast_does_not_reach_into_the_sums():
    """Blocked computes half precision in float32; autocast around it must not make that half again."""
    q, k, v = (x.bfloat16() for x in tensors(n=200, d_qk=32))
    slopes = torch.randn_like(v)
    outside = results("blocked", q, k, v, slopes, PATTERN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results("blocked", q, k, v, slopes, PATTERN)  # backward, too
    assert all(torch.equal(x, y) for x, y in zip(outside, inside))


def test_half_precision_is_summed_in_single():
    """The result is that of float32 on the same numbers, rounded once; its gradients all but."""
    low = [x.bfloat16() for x in tensors(n=200, d_qk=32)]
    slopes = torch.randn_like(low[2])
    ours = results("blocked", *low, slopes, PATTERN)
    single = results("blocked", *(x.float() for x in low), slopes.float(), PATTERN)
    assert torch.equal(ours[0], single[0].bfloat16())
    assert torch.equal(ours[3], single[3].bfloat16())


@ALL
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(impl, dynamic):
    torch._dynamo.reset()

    def call(q, k, v, pattern):
        return attend(q, k, v, [pattern, Block(6) | Summary(6, 2), Dense()], impl=impl)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for pattern in (PATTERN, Local(2), PATTERN):
        inputs = [x.requires_grad_() for x in tensors()]
        expected = torch.autograd.grad(call(*inputs, pattern).square().sum(), inputs)
        actual = torch.autograd.grad(compiled(*inputs, pattern).square().sum(), inputs)
        for ours, theirs in zip(actual, expected):
            torch.testing.assert_close(ours, theirs)
    longer = tensors(n=31)
    torch.testing.assert_close(compiled(*longer, PATTERN), call(*longer, PATTERN))


@ALL
def test_compiles_for_any_number_of_heads(impl):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attend(*x, PATTERN, impl=impl), fullgraph=True, backend="aot_eager")
    for heads in (2, 3, 4):  # The second number makes it symbolic.
        inputs = tensors(heads=heads)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs, PATTERN, impl=impl))


def test_a_scale_of_numpy_is_refused_by_name_under_torch_compile():
    """To torch.compile it is an array without a value. The plain call takes it."""
    q, k, v = tensors()
    scale = np.float32(0.5)
    assert torch.equal(attend(q, k, v, PATTERN, scale=scale), attend(q, k, v, PATTERN, scale=0.5))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, PATTERN, scale=float(scale)), attend(q, k, v, PATTERN, scale=0.5))
    for given, kind in ((scale, "ndarray"), (np.int64(1), "ndarray"), (torch.tensor(0.5), "Tensor")):
        says = f"attend: scale under torch.compile must be a float or an int of Python, got {kind}; call float\\(\\) on it"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=says):
            compiled(q, k, v, PATTERN, scale=given)


@pytest.mark.parametrize("impl", ["blocked", "reference"])
@pytest.mark.parametrize("strict", [False, True])
def test_exports_for_any_n(impl, strict):
    class Four(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, [PATTERN, Block(6) | Summary(6, 2), Dilated(3, 9), Dense()], impl=impl)

    n = torch.export.Dim("n")
    shapes = {name: {2: n} for name in "qkv"}
    exported = torch.export.export(Four(), tuple(tensors(heads=4)), dynamic_shapes=shapes, strict=strict).module()
    for length in (7, 100):
        inputs = tensors(heads=4, n=length)
        torch.testing.assert_close(exported(*inputs), Four()(*inputs))


@ALL
def test_an_empty_batch(impl):
    q, k, v = (x.requires_grad_() for x in tensors(batch=0))
    output = attend(q, k, v, [PATTERN, Block(4), Summary(4, 2)], impl=impl)
    assert output.shape == (0, 3, 23, 6)
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


@ALL
@pytest.mark.parametrize("options", [{"documents": (3, 10, 10)}, {"documents": (3, 20)}, {"offset": 2}], ids=str)
def test_an_empty_batch_of_any_layout(impl, options):
    q, k, v = (x.requires_grad_() for x in tensors(batch=0))
    q = q[:, :, :5] if "offset" in options else q
    output = attend(q, k, v, [PATTERN, Block(4), Summary(4, 2)], impl=impl, **options)
    assert output.shape == (0, 3, q.shape[2], 6)
    output.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@ALL
def test_a_single_position(impl):
    q, k, v = tensors(n=1)
    for pattern in (PATTERN, Dense(), Block(9)):
        torch.testing.assert_close(attend(q, k, v, pattern, impl=impl), v)
    assert (attend(q, k, v, Summary(9, 1), impl=impl) == 0).all()


@ALL
def test_inference_mode_then_training(impl):
    q, k, v = (x.requires_grad_() for x in tensors())
    with torch.inference_mode():
        first = attend(q, k, v, PATTERN, impl=impl)
    second = attend(q, k, v, PATTERN, impl=impl)
    second.sum().backward()
    assert torch.equal(first, second)


@ALL
@pytest.mark.parametrize("pattern", [PATTERN, Block(8) | Summary(8, 2), Summary(9, 2), [Dense(), Summary(50, 1)]], ids=repr)
def test_every_element_is_written(poisoned, impl, pattern):
    for n in (1, 7, 64, 65):
        inputs = [x.requires_grad_() for x in tensors(heads=2, n=n, d_v=4)]
        output = attend(*inputs, pattern, impl=impl)
        for x in (output, *torch.autograd.grad(output, inputs, torch.randn_like(output))):
            assert x.isfinite().all()


@ALL
def test_a_query_without_keys_gets_nothing(impl):
    q, k, v = (x.requires_grad_() for x in tensors(1, 1, 6, 2, 2))
    output = attend(q, k, v, Summary(4, 1), impl=impl)
    assert (output[0, 0, :3] == 0).all()
    output.sum().backward()
    assert q.grad is not None
    assert (q.grad[0, 0, :3] == 0).all()
    assert q.grad.isfinite().all()


@ALL
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)])
def test_only_the_gradients_that_are_needed(impl, wanted):
    pattern = Block(8) | Summary(8, 2)
    whole = [x.requires_grad_() for x in tensors(1, 2, 30, 4, 5)]
    some = [x.detach().requires_grad_(want) for x, want in zip(whole, wanted)]
    attend(*whole, pattern, impl=impl).square().sum().backward()
    attend(*some, pattern, impl=impl).square().sum().backward()
    for x, y, want in zip(whole, some, wanted):
        assert (y.grad is not None) == want
        assert not want or torch.equal(x.grad, y.grad)


X = torch.randn(2, 3, 5, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((X[0], X, X, PATTERN), {}, r"q must be \[batch, heads, n, d\], got 3 dimensions: \[3, 5, 4\]"),
        ((X, X, X[..., 0], PATTERN), {}, "v must be .* got 3 dimensions"),
        (
            (X, X[:, :2], X[:, :2], PATTERN),
            {},
            r"heads of q must be a multiple of those of k and v, got .* k \[2, 2, 5, 4\]",
        ),
        ((X[:, :2], X, X, PATTERN), {}, "heads of q must be a multiple of those of k and v"),
        ((X, X[:, :0], X[:, :0], PATTERN), {}, "heads of q must be a multiple of those of k and v"),
        ((X, X[..., :3], X, PATTERN), {}, r"q and k must have the same batch and the same d_qk, got .* k \[2, 3, 5, 3\]"),
        ((X, X[:1], X[:1], PATTERN), {}, "q and k must have the same batch and the same d_qk"),
        ((X, X, X[:, :, :4], PATTERN), {}, r"v must have k's batch, heads and n, got q .* and v \[2, 3, 4, 4\]"),
        (
            (X, X[:, :, :4], X[:, :, :4], PATTERN),
            {},
            r"q must not have more positions than k and v, got .*, as \[batch, heads, n, d\]",
        ),
        ((X[:, :, :2], X, X, PATTERN), {"offset": 4}, "offset = 4 must be a whole number from 0 to 3, so that 2 queries"),
        ((X, X, X, PATTERN), {"offset": -1}, "offset = -1 must be a whole number from 0 to 0"),
        ((X, X, X, PATTERN), {"offset": 0.0}, "offset = 0.0 must be a whole number"),
        ((X, X, X, PATTERN), {"documents": [2, 2]}, "documents add up to 4 positions, but k has 5; give lengths"),
        ((X, X, X, PATTERN), {"documents": []}, "documents add up to 0 positions"),
        ((X, X, X, PATTERN), {"documents": [5, 0]}, r"documents\[1\] must be a length, a whole number of at least 1, got 0"),
        (
            (X, X, X, PATTERN),
            {"documents": [0, 3, 5]},
            r"documents\[0\] must .*; boundaries such as cu_seqlens are not lengths",
        ),
        ((X, X, X, PATTERN), {"documents": [2.5, 2.5]}, r"documents\[0\] must be a length, .* got 2.5"),
        ((X, X, X, PATTERN), {"documents": 5}, "documents must be a sequence of lengths or an integer tensor .* got 5"),
        (
            (X, X, X, PATTERN),
            {"documents": X[0, 0]},
            r"documents must be an integer tensor \[2, 5\], got torch.float32 \[5, 4\]",
        ),
        (
            (X, X, X, PATTERN),
            {"documents": X[0, 0, :, 0].long()},
            r"torch.int64 \[5\]; give documents.tolist\(\) for lengths",
        ),
        (
            (X, X, X, PATTERN),
            {"documents": X[0, 0, :, 0].numpy()},
            r"documents must be a sequence of lengths .*; give documents.tolist\(\) for lengths, or torch.from_numpy",
        ),
        (
            (X, X, X, PATTERN),
            {"documents": torch.zeros(2, 5, dtype=torch.long, device="meta")},
            "documents is a tensor on the meta device, without values; give a dense one with values, or a sequence",
        ),
        (
            (X, X, X, PATTERN),
            {"documents": torch.zeros(2, 5, dtype=torch.long).to_sparse()},
            r"documents is a tensor torch\.sparse_coo; give a dense one with values, or a sequence of lengths",
        ),
        (
            (X, X, X.double(), PATTERN),
            {},
            "must have one dtype, got q torch.float32, k torch.float32 and v torch.float64",
        ),
        ((X, X, X.to("meta"), PATTERN), {}, "must be on one device, got q cpu, k cpu and v meta"),
        ((X.long(), X.long(), X.long(), PATTERN), {}, "q has dtype torch.int64; it must be float64, float32"),
        ((X.numpy(), X, X, PATTERN), {}, "q must be a tensor, got ndarray"),
        ((X, X.to_sparse(), X, PATTERN), {}, "k is a sparse_coo tensor; give a dense one, and sequences in one row as doc"),
        ((torch.nested.nested_tensor([X[0], X[1]]), X, X, PATTERN), {}, "q is a nested tensor; give a dense one"),
        ((X, X, X, PATTERN), {"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
        (
            (X[:, :, :0], X[:, :, :0], X[:, :, :0], PATTERN),
            {},
            r"q has shape \[2, 3, 0, 4\]; heads, n and d must be at least 1",
        ),
        ((X, X, X, [PATTERN] * 2), {}, "pattern has 2 patterns for 3 heads"),
        ((X, X, X, [PATTERN, 5, PATTERN]), {}, r"pattern\[1\] must be a Pattern, got 5"),
        (
            (X, X, X, "local(4)"),
            {},
            "pattern must be a Pattern or a sequence .* got 'local\\(4\\)'; longstride.parse reads",
        ),
        ((X, X, X, None), {}, "pattern must be a Pattern .* got None"),
        ((X, X, X, X[0, 0] > 0), {}, r"pattern must be a Pattern .* got a tensor \[5, 4\]; masks are not taken"),
        ((X, X, X, Local), {}, r"pattern must be a Pattern .* got the class Local; give Local\(\.\.\.\)"),
        ((X, X, X, [Local, Local, PATTERN]), {}, r"pattern\[0\] must be a Pattern, got the class Local; give Local"),
        ((X, X, X, PATTERN), {"impl": "bloked"}, "impl = 'bloked' is not an implementation; did you mean 'blocked'?"),
        ((X, X, X, PATTERN), {"impl": "cuda"}, "the names are auto, reference, blocked, triton"),
        ((X, X, X, PATTERN), {"scale": float("nan")}, "scale must be a finite number .* got nan"),
        ((X, X, X, PATTERN), {"scale": "1"}, "scale must be a finite number .* got '1'"),
        ((X, X, X, PATTERN), {"scale": 10**400}, "scale must be a finite number"),
    ],
)
def test_mistakes_are_named(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        attend(*arguments, **options)
