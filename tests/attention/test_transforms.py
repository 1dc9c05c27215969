"""attend under PyTorch's function transforms: right, or refused in plain words."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from longstride import attend
from longstride.attention.kernels.launch import forget_plans
from longstride.patterns import Local, Summary
from tests.attention.error_rule import Ran

HEADS = [Local(2), Summary(3, 1)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = pytest.mark.parametrize("impl", ["reference", "blocked", "triton"])
FAST = pytest.mark.parametrize("impl", ["blocked", "triton"])
NO_TANGENTS = "attend: impl = '{}' has no forward-mode derivatives .*; impl = 'reference' has them"
NOT_TWICE = "attend: impl = '{}' can be differentiated once, not twice; impl = 'reference'"


def tensors(*more):
    return [torch.randn(*more, 1, 2, 5, d, device=DEVICE) for d in (3, 3, 2)]


def loss(q, k, v, impl):
    return attend(q, k, v, HEADS, impl=impl).square().sum()


def plain_gradients(q, k, v, impl):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(loss(*inputs, impl), inputs)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=4e-6)


@ALL
def test_grad_and_vjp(impl):
    inputs = tensors()
    expected = plain_gradients(*inputs, impl)
    assert_close(grad(loss, argnums=(0, 1, 2))(*inputs, impl), expected)
    assert_close(grad(loss, argnums=1)(*inputs, impl), expected[1])
    output, pull_back = vjp(lambda *x: attend(*x, HEADS, impl=impl), *inputs)
    assert_close(output, attend(*inputs, HEADS, impl=impl))
    assert_close(pull_back(2 * output), expected)
    assert_close(pull_back(output), tuple(x / 2 for x in expected))  # Outside of the transform, and once more.


@ALL
def test_jacrev(impl):
    inputs = tensors()

    def few(q, k, v, impl):
        return attend(q, k, v, HEADS, impl=impl)[0, :, -1, 0]

    ours = jacrev(few, argnums=(0, 1, 2))(*inputs, impl)
    assert_close(ours, jacrev(few, argnums=(0, 1, 2))(*inputs, "reference"))
    assert ours[0].abs().max() > 0
    by_autograd = torch.autograd.functional.jacobian(lambda q: few(q, *inputs[1:], impl), inputs[0], vectorize=True)
    assert_close(by_autograd, ours[0])


@ALL
@pytest.mark.parametrize("mapped", [(0, None, 2), (None, -1, None)])
def test_vmap(impl, mapped):
    """The mapped dimension may be any, or none, of each input."""
    stacks = [x if dim is not None else x[0] for x, dim in zip(tensors(2), mapped)]
    inputs = [x if dim is None else x.movedim(0, dim) for x, dim in zip(stacks, mapped)]
    each = [[x if dim is None else x[index] for x, dim in zip(stacks, mapped)] for index in range(2)]

    def call(*x):
        return attend(*x, HEADS, impl=impl)

    assert_close(vmap(call, in_dims=mapped)(*inputs), torch.stack([call(*x) for x in each]))
    ours = vmap(grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2)), in_dims=mapped)(*inputs)
    for ours_of_one, theirs in zip(ours, zip(*(plain_gradients(*x, impl) for x in each))):
        assert_close(ours_of_one, torch.stack(theirs))
    assert_close(vmap(grad(lambda *x: call(*x).square().sum(), argnums=2), in_dims=mapped)(*inputs), ours[2])


@FAST
def test_vmap_is_one_call_of_the_operator(impl):
    """Not one for each entry, as without a rule."""
    with Ran() as ran:
        vmap(vmap(lambda *x: attend(*x, HEADS, impl=impl)))(*tensors(2, 2))
    assert ran.ops.count(f"longstride.{impl}_forward") == 1


@ALL
def test_vmap_over_empty_batches(impl):
    inputs = [x[:, :0] for x in tensors(4)]
    assert vmap(lambda *x: attend(*x, HEADS, impl=impl))(*inputs).shape == (4, 0, 2, 5, 2)


@pytest.mark.parametrize("by", [grad, lambda call: lambda q: jvp(call, (q,), (torch.ones_like(q),))[1]])
def test_the_reference_has_every_derivative(by):
    q, k, v = (x.double() for x in tensors())
    step = 1e-6

    def call(x):
        return loss(q + x * torch.ones_like(q), k, v, "reference")

    zero = torch.zeros((), dtype=torch.float64, device=DEVICE)
    by_difference = (by(call)(zero + step) - by(call)(zero - step)) / (2 * step)
    torch.testing.assert_close(by(by(call))(zero), by_difference, rtol=1e-5, atol=1e-5)
    expected = (call(zero + step) - call(zero - step)) / (2 * step)
    torch.testing.assert_close(by(call)(zero), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hessian(call)(zero), by_difference, rtol=1e-5, atol=1e-5)


def dual_numbers(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def test_the_reference_is_traced():
    """By make_fx, and by linearize, which traces: values are then not inspected for NaN."""
    q, *others = tensors()

    def call(q):
        return attend(q, *others, HEADS, impl="reference")

    assert_close(make_fx(call)(q)(2 * q), call(2 * q))
    output, push_forward = linearize(call, q)
    assert_close(output, call(q))
    assert_close(push_forward(q), jvp(call, (q,), (q,))[1])


FORWARD_MODE = {
    "jvp": lambda call, x: jvp(call, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda call, x: jacfwd(call)(x),
    "dual numbers": dual_numbers,
    "hessian": lambda call, x: hessian(call)(x),
    "jvp of grad": lambda call, x: jvp(grad(call), (x,), (torch.ones_like(x),))[1],
    "grad of jvp": lambda call, x: grad(lambda y: jvp(call, (y,), (torch.ones_like(y),))[1])(x),
    "vmap of jvp": lambda call, x: vmap(lambda y: jvp(call, (y,), (torch.ones_like(y),))[1])(x[None]),
}


@FAST
@pytest.mark.parametrize("mode", FORWARD_MODE)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_refused(impl, mode, which):
    inputs = tensors()

    def call(x):
        return loss(*inputs[:which], x, *inputs[which + 1 :], impl)

    with pytest.raises(NotImplementedError, match=NO_TANGENTS.format(impl)):
        FORWARD_MODE[mode](call, inputs[which])


@FAST
def test_forward_mode_beside_attention_is_not_refused(impl):
    """Tangents of other tensors are no reason to refuse, nor is a level around it all."""
    inputs = tensors()
    output, tangent = jvp(lambda x: attend(*inputs, HEADS, impl=impl) * x, (inputs[2],), (inputs[2],))
    assert_close(tangent, output)
    with forward_ad.dual_level():
        assert_close(plain_gradients(*inputs, impl), plain_gradients(*inputs, "reference"))


@FAST
def test_forward_mode_through_the_gradient_is_refused(impl):
    inputs = tensors()
    output, pull_back = vjp(lambda *x: attend(*x, HEADS, impl=impl), *inputs)
    with pytest.raises(NotImplementedError, match=NO_TANGENTS.format(impl)):
        jvp(pull_back, (output,), (output,))


@FAST
def test_second_derivatives_are_refused(impl):
    inputs = [x.requires_grad_() for x in tensors()]
    gradients = torch.autograd.grad(loss(*inputs, impl), inputs, create_graph=True)
    assert_close([x.detach() for x in gradients], list(plain_gradients(*inputs, "reference")))
    with pytest.raises(NotImplementedError, match=NOT_TWICE.format(impl)):
        sum(x.sum() for x in gradients).backward()
    with pytest.raises(NotImplementedError, match=NOT_TWICE.format(impl)):
        jacrev(grad(loss))(*(x.detach() for x in inputs), impl)


@ALL
def test_grad_compiles(impl):
    inputs = tensors()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: grad(loss, argnums=(0, 1, 2))(*x, impl), backend="aot_eager", fullgraph=True)
    assert_close(compiled(*inputs), plain_gradients(*inputs, impl))


@FAST
def test_vmap_of_a_compiled_call(impl):
    torch._dynamo.reset()
    forget_plans()  # torch.compile gives up at the transform, and must not trace how a plan is made instead.
    inputs = tensors(3)
    compiled = torch.compile(lambda *x: attend(*x, HEADS, impl=impl), backend="aot_eager")
    assert_close(vmap(compiled)(*inputs), vmap(lambda *x: attend(*x, HEADS, impl="reference"))(*inputs))


@FAST
def test_a_backward_pass_compiles(impl):
    torch._dynamo.reset()
    forget_plans()
    inputs = [x.requires_grad_() for x in tensors()]
    total = loss(*inputs, impl)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        total.backward()
    assert_close([x.grad for x in inputs], list(plain_gradients(*inputs, impl)))


@FAST
@pytest.mark.parametrize("return_lse", [False, True])
def test_zeros_without_memory(impl, return_lse):
    q, k, v = (x.requires_grad_() for x in tensors())
    output = attend(q, k, v, HEADS, impl=impl, return_lse=return_lse)
    output = output[0] if return_lse else output
    zeros = torch._efficientzerotensor(output.shape, device=DEVICE)
    assert not any(x.any() for x in torch.autograd.grad(output, (q, k, v), zeros))
    nothing = torch._efficientzerotensor(q.shape, device=DEVICE)
    expected = attend(torch.zeros_like(q), k, v, HEADS, impl=impl)
    assert_close(attend(nothing, k, v, HEADS, impl=impl), expected)
