"""Packed queries, keys and values: as `attend` on their parts, with one gradient."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.api import attend_packed, unpack
from longstride.patterns import Block, Column, Local, Summary, fixed, strided, union
from tests.attention.error_rule import Ran

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PATTERNS = [
    [Local(20), Local(20)],
    [Column(7), Column(7)],
    [union(*strided(12))] * 2,
    [union(*fixed(16, 4))] * 2,
    [Block(32) | Summary(32, 8, part) for part in range(2)],
    [Local(9), Column(4) | Column(6)],
]
SHAPES = [(2, 40, 16, 16), (1, 33, 5, 3)]
if GPU:
    PATTERNS += [[union(*fixed(128, 32))] * 2, [union(*strided(128))] * 2, [Local(128)] * 2, [Column(128)] * 2]
    SHAPES += [(2, 1024, 64, 64), (2, 1000, 32, 64)]
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TRITON = "longstride.triton_packed_backward"


def packed(batch, n, d_qk, d_v, dtype=torch.float32):
    """Two heads, packed, and their sizes."""
    sizes = 2 * d_qk, 2 * d_qk, 2 * d_v
    x = torch.randn(batch, n, sum(sizes), generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE, dtype).requires_grad_(), sizes


def both(output, x):
    slopes = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, x, slopes)]


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_its_parts(dtype, shape, patterns, poisoned):
    """Bit for bit: the same kernels run."""
    x, sizes = packed(*shape, dtype=dtype)
    with Ran() as ran:
        found = both(attend_packed(x, sizes, patterns, impl="triton"), x)
    assert TRITON in ran.ops
    assert "aten.cat" not in ran.ops
    expected = both(attend(*unpack(x, sizes, 2), patterns, impl="triton"), x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_other_implementations(impl):
    x, sizes = packed(2, 33, 5, 3)
    found = both(attend_packed(x, sizes, [Local(7), Column(5)], impl=impl), x)
    expected = both(attend(*unpack(x, sizes, 2), [Local(7), Column(5)], impl=impl), x)
    assert all(map(torch.equal, found, expected))


def test_without_gradients():
    x, sizes = packed(2, 33, 4, 4)
    with torch.no_grad():
        output = attend_packed(x, sizes, [Local(7)] * 2, impl="triton")
        assert torch.equal(output, attend(*unpack(x, sizes, 2), Local(7), impl="triton"))


def test_keeps_the_rules_of_pytorch():
    import longstride.attention.kernels.packed  # noqa: F401 - which registers the operators

    op = torch.ops.longstride.triton_packed_backward.default
    x, sizes = packed(2, 33, 4, 6)
    output, lse = torch.ops.longstride.triton_forward(*unpack(x.detach(), sizes, 2), "local(7), local(7)", 0.5, [])
    arguments = torch.randn_like(output), x.detach(), output, lse, sizes, 2, "local(7), local(7)", 0.5
    checked = torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(checked.values()) == {"SUCCESS"}


def test_numbers_that_lie_negated_in_memory():
    x, sizes = packed(2, 33, 4, 6)
    expected = both(attend_packed(x, sizes, [Local(7)] * 2, impl="triton"), x)
    negated = torch._neg_view(-x.detach()).requires_grad_()
    output = attend_packed(negated, sizes, [Local(7)] * 2, impl="triton")
    assert all(map(torch.equal, both(output, negated), expected))
    output = attend_packed(x, sizes, [Local(7)] * 2, impl="triton")
    slopes = torch.randn_like(output)
    found = torch.autograd.grad(output, x, torch._neg_view(-slopes), retain_graph=True)
    assert torch.equal(*found, *torch.autograd.grad(output, x, slopes))


def test_patterns_are_validated():
    x, sizes = packed(1, 9, 4, 6)
    with pytest.raises(ValueError, match=r"pattern\[1\] must be a Pattern, got 'local\(3\)'"):
        attend_packed(x, sizes, [Local(3), "local(3)"], impl="triton")


def loss(x, sizes):
    return attend_packed(x, sizes, [Local(7), Column(5)], impl="triton").square().sum()


TWICE = {
    "autograd": lambda call, x: torch.autograd.grad(torch.autograd.grad(call(x), x, create_graph=True)[0].square().sum(), x),
    "grad of grad": lambda call, x: grad(lambda y: grad(call)(y).square().sum())(x.detach()),
    "jacrev of grad": lambda call, x: jacrev(grad(call))(x.detach()),
}


@pytest.mark.parametrize("by", TWICE)
def test_second_derivatives_are_refused(by):
    x, sizes = packed(1, 9, 4, 3)
    with pytest.raises(NotImplementedError, match="attend: impl = 'triton' can be differentiated once, not twice"):
        TWICE[by](lambda x: loss(x, sizes), x)


def dual_number(call, x):
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("by", [dual_number, lambda call, x: hessian(call)(x.detach())])
def test_forward_mode_is_refused(by):
    x, sizes = packed(1, 9, 4, 3)
    with pytest.raises(NotImplementedError, match="attend: impl = 'triton' has no forward-mode derivatives"):
        by(lambda x: loss(x, sizes), x)


@pytest.mark.parametrize("dim", [0, 2])
def test_vmap_of_grad(dim):
    x, sizes = packed(3, 9, 4, 3)
    x = x.detach().unsqueeze(1)  # [mapped, batch, n, width]
    expected = torch.stack([grad(loss)(entry, sizes) for entry in x])
    assert expected.abs().max() > 0
    found = vmap(grad(lambda entry: loss(entry, sizes)), in_dims=dim)(x.movedim(0, dim))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=4e-6)


def test_many_slopes_at_once():
    """A batch of incoming gradients, as `is_grads_batched` gives them."""
    x, sizes = packed(1, 9, 4, 3)
    output = attend_packed(x, sizes, [Local(7), Column(5)], impl="triton")
    slopes = torch.randn(3, *output.shape, device=DEVICE)
    (found,) = torch.autograd.grad(output, x, slopes, retain_graph=True, is_grads_batched=True)
    expected = torch.stack([torch.autograd.grad(output, x, one, retain_graph=True)[0] for one in slopes])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=4e-6)


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    x, sizes = packed(2, 33, 4, 4)

    def call(x):
        return attend_packed(x, sizes, [Local(7)] * 2, impl="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, both(compiled(x), x), both(call(x), x)))


def test_selective_recomputation_keeps_the_output():
    x, sizes = packed(1, 33, 4, 4)

    def keep(context, op, *_, **__):
        return CheckpointPolicy.MUST_SAVE if op.namespace == "longstride" else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x):
        return attend_packed(x * 2, sizes, [Local(7)] * 2, impl="triton")

    output = checkpoint(call, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep))
    with Ran() as ran:
        found = both(output, x)
    assert "longstride.triton_forward" not in ran.ops
    assert TRITON in ran.ops
    assert all(map(torch.equal, found, both(call(x), x)))


def test_flops():
    x, sizes = packed(2, 33, 4, 6)
    counts = []
    for call in (lambda: attend_packed(x, sizes, [Local(7)] * 2, impl="triton"),
                 lambda: attend(*unpack(x, sizes, 2), [Local(7)] * 2, impl="triton")):  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
