"""What lies between matrix products: operators and kernels against plain PyTorch, and a network made of them."""

import copy

import pytest
import torch
import torch.nn.functional as F

from longstride.model import dropout, layers, residual, residual_kernels, residual_ops
from longstride.model.dropout import draw_mask
from longstride.model.dropout_kernel import fill_mask
from longstride.model.layers import Norm, RootMeanSquareNorm
from longstride.model.residual import Dropout, Product
from tests.attention.error_rule import Ran
from tests.model.small import model, some_bytes

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
SHAPES = [(1, 4), (7, 64), (2, 5, 260), (130, 512) if GPU else (13, 512), (3, 2048) if GPU else (3, 700)]
ops = torch.ops.longstride_model


@pytest.fixture
def fused(monkeypatch):
    """Models take the fused functions on a CPU, too; the operators compute them in plain PyTorch there."""
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())


@pytest.fixture
def kernels(monkeypatch, poisoned):
    """The operators run their kernels; without a GPU in Triton's interpreter, with masks as on a GPU."""

    def draw(x, rate, seed):
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        fill_mask(mask, seed, 1 - rate)
        return mask

    monkeypatch.setattr(residual_ops, "_run_kernels", lambda x, whole_rows=True: residual_kernels.takes(x, whole_rows))
    monkeypatch.setattr(residual_ops, "draw_mask", draw)


def inputs(shape, dtype=torch.float32):
    """A stream, a branch and its bias, weight and bias of a norm, and a seed."""
    generator = torch.Generator().manual_seed(len(shape))

    def some(*shape):
        return torch.randn(shape, generator=generator)

    stream, branch = (some(*shape).to(DEVICE, dtype) for _ in range(2))
    vectors = [x.to(DEVICE) for x in (some(shape[-1]), 1 + 0.3 * some(shape[-1]), some(shape[-1]))]
    return stream, branch, *vectors, torch.tensor(2**40 + 77, device=DEVICE)


def results(function, tensors, seed, dtype=torch.float32):
    """The results of a function, and the gradients of its tensors from a slope for each result, rounded to `dtype`."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    made = function(*leaves, seed)
    generator = torch.Generator().manual_seed(9)
    slopes = [torch.randn(x.shape, generator=generator).to(dtype).to(x.device, x.dtype) for x in made]
    return [*(x.detach() for x in made), *torch.autograd.grad(made, leaves, slopes)]


def dropped(x, seed, keep):
    return x if seed is None else x * residual_ops.draw_mask(x, 1 - keep, seed) / keep


def plain_add_norm(stream, branch, branch_bias, weight, bias, seed, keep=0.7):
    h = stream + dropped(branch + branch_bias.to(branch.dtype), seed, keep)
    return h, F.layer_norm(h, weight.shape, weight.to(h.dtype), bias.to(h.dtype), 1e-5)


def our_add_norm(stream, branch, branch_bias, weight, bias, seed, keep=0.7):
    return residual._AddNorm.apply(stream, branch, branch_bias, weight, bias, seed, keep, 1e-5)[:2]


def plain_add_norm_unbiased(stream, branch, weight, bias, seed):
    return plain_add_norm(stream, branch, torch.zeros_like(weight), weight, bias, seed)


def our_add_norm_unbiased(stream, branch, weight, bias, seed):
    return our_add_norm(stream, branch, None, weight, bias, seed)


def plain_add_rms_norm(stream, branch, branch_bias, seed, keep=0.7):
    h = stream + dropped(branch + branch_bias.to(branch.dtype), seed, keep)
    return h, F.rms_norm(h, h.shape[-1:], eps=1e-5)


def our_add_rms_norm(stream, branch, branch_bias, seed):
    return our_add_norm(stream, branch, branch_bias, None, None, seed)


def plain_add_rms_norm_unbiased(stream, branch, seed):
    return plain_add_rms_norm(stream, branch, branch.new_zeros(()), seed)


def our_add_rms_norm_unbiased(stream, branch, seed):
    return our_add_rms_norm(stream, branch, None, seed)


def plain_rms_norm(stream, seed):
    return stream * 1, F.rms_norm(stream, stream.shape[-1:], eps=1e-5)


def our_rms_norm(stream, seed):
    return our_norm(stream, None, None, seed)


def plain_norm(stream, weight, bias, seed):
    return stream * 1, F.layer_norm(stream, weight.shape, weight.to(stream.dtype), bias.to(stream.dtype), 1e-5)


def our_norm(stream, weight, bias, seed):
    return residual._AddNorm.apply(stream, None, None, weight, bias, None, 1.0, 1e-5)[:2]


def plain_add(stream, branch, branch_bias, seed, keep=0.7):
    return (stream + dropped(branch + branch_bias.to(branch.dtype), seed, keep),)


def our_add(stream, branch, branch_bias, seed, keep=0.7):
    return (residual._Add.apply(stream, branch, branch_bias, seed, keep),)


def plain_gelu(x, bias, seed):
    shifted = x + bias.to(x.dtype)
    return (shifted * torch.sigmoid(1.702 * shifted),)


def our_gelu(x, bias, seed):
    return (residual._BiasGelu.apply(x, bias),)


def plain_unbiased_gelu(x, seed):
    return (x * torch.sigmoid(1.702 * x),)


def our_unbiased_gelu(x, seed):
    return (residual._BiasGelu.apply(x, None),)


CASES = {
    "add_norm": (our_add_norm, plain_add_norm, (0, 1, 2, 3, 4)),
    "add_norm_unbiased": (our_add_norm_unbiased, plain_add_norm_unbiased, (0, 1, 3, 4)),
    "add_rms_norm": (our_add_rms_norm, plain_add_rms_norm, (0, 1, 2)),
    "add_rms_norm_unbiased": (our_add_rms_norm_unbiased, plain_add_rms_norm_unbiased, (0, 1)),
    "norm": (our_norm, plain_norm, (0, 3, 4)),
    "rms_norm": (our_rms_norm, plain_rms_norm, (0,)),
    "add": (our_add, plain_add, (0, 1, 2)),
    "gelu": (our_gelu, plain_gelu, (0, 2)),
    "gelu_unbiased": (our_unbiased_gelu, plain_unbiased_gelu, (0,)),
}


def assert_within_the_rule(case, shape, dtype, with_seed):
    """At most twice as far from float64 as plain PyTorch in this dtype, and a few roundings: each result and gradient."""
    ours, plain, chosen = CASES[case]
    given = inputs(shape, dtype)
    tensors, seed = [given[index] for index in chosen], given[-1] if with_seed else None
    found = results(ours, tensors, seed, dtype), results(plain, tensors, seed, dtype)
    exact = results(plain, [x.double() for x in tensors], seed, dtype)
    for number, (our, same, true) in enumerate(zip(*found, exact)):
        assert our.dtype == same.dtype
        distance, allowed = ((x.double() - true).abs().max().item() for x in (our, same))
        rounding = 32 * torch.finfo(torch.float32).eps + torch.finfo(our.dtype).eps / 2
        assert distance <= 2 * allowed + rounding * true.abs().max().item(), number


@pytest.mark.parametrize("with_seed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["add_norm", "add_norm_unbiased", "add_rms_norm", "add_rms_norm_unbiased", "add"])
def test_kernels_with_a_branch(case, dtype, shape, with_seed, kernels):
    assert_within_the_rule(case, shape, dtype, with_seed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["norm", "rms_norm", "gelu", "gelu_unbiased"])
def test_kernels_without_a_branch(case, dtype, shape, kernels):
    assert_within_the_rule(case, shape, dtype, False)


@pytest.mark.parametrize("with_seed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_operators_in_plain_pytorch(case, with_seed):
    ours, plain, chosen = CASES[case]
    given = inputs((3, 5, 24))
    tensors, seed = [given[index].double().cpu() for index in chosen], given[-1].cpu() if with_seed else None
    for our, expected in zip(results(ours, tensors, seed), results(plain, tensors, seed)):
        torch.testing.assert_close(our, expected)


@pytest.mark.parametrize("with_seed", [False, True])
def test_an_rms_norm_is_one_launch_each_way(with_seed, kernels, monkeypatch):
    """Without weights and a branch's bias nothing is summed over rows."""
    launched, make_plan = [], residual_kernels.Plan

    def recorded(launches, *rest):
        launched.extend(launch.kernel.fn.__name__ for launch in launches)
        return make_plan(launches, *rest)

    monkeypatch.setattr(residual_kernels, "Plan", recorded)
    *tensors, seed = inputs((5, 132 + 4 * with_seed))  # No plan is there for these shapes.
    results(our_add_rms_norm_unbiased, tensors[:2], seed if with_seed else None)
    assert launched == ["forward", "backward"]


def test_kernels_draw_the_mask_of_the_operator(kernels):
    """Zeros plus ones, dropped: the mask itself, at any width."""
    for shape in SHAPES:
        zero, one = torch.zeros(shape, device=DEVICE), torch.ones(shape, device=DEVICE)
        seed = torch.tensor(5, device=DEVICE)
        for result in (ops.add(zero, one, None, seed, 0.5), ops.add_backward(one, seed, 0.5)[0]):
            assert torch.equal(result == 2, residual_ops.draw_mask(one, 0.5, seed))
            assert ((result == 0) | (result == 2)).all()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_operator_draws_with_the_kernel():
    x, seed = torch.empty(3, 512, device=DEVICE), torch.tensor(5, device=DEVICE)
    mask = torch.empty(x.shape, dtype=torch.bool, device=DEVICE)
    fill_mask(mask, seed, 0.5)
    assert torch.equal(draw_mask(x, 0.5, seed), mask)


@pytest.mark.parametrize("with_seed", [False, True])
def test_operators_keep_the_rules_of_pytorch(with_seed):
    stream, branch, branch_bias, weight, bias, seed = inputs((3, 5, 24))
    seed = seed if with_seed else None
    mean, scale = torch.randn(2, 15, device=DEVICE)
    for op, arguments in (
        (ops.add_norm, (stream, branch, branch_bias, weight, bias, seed, 0.7, 1e-5)),
        (ops.add_norm, (stream, None, None, weight, bias, None, 1.0, 1e-5)),
        (ops.add_norm_backward, (stream, branch, stream, weight, mean, scale, seed, 0.7, True)),
        (ops.add_norm_backward, (stream, branch, stream, weight, mean, scale, seed, 0.7, False)),
        (ops.add_norm, (stream, branch, branch_bias, None, None, seed, 0.7, 1e-5)),
        (ops.add_norm, (stream, None, None, None, None, None, 1.0, 1e-5)),
        (ops.add_norm_backward, (stream, branch, stream, None, mean[:0], scale, seed, 0.7, True)),
        (ops.add_norm_backward, (stream, branch, stream, None, mean[:0], scale, seed, 0.7, False)),
        (ops.add, (stream, branch, branch_bias, seed, 0.7)),
        (ops.add, (stream, branch, None, seed, 0.7)),
        (ops.add_backward, (stream, seed, 0.7)),
        (ops.bias_gelu, (stream, bias)),
        (ops.bias_gelu, (stream, None)),
        (ops.bias_gelu_backward, (stream, branch, bias)),
        (ops.bias_gelu_backward, (stream, branch, None)),
        (ops.linear_backward, (stream, branch[..., :20], with_seed)),
        (ops.float32_product, (stream.bfloat16(), branch[0].bfloat16())),
    ):
        checked = torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checked.values()) == {"SUCCESS"}, op


def transposed(x):
    """The same numbers, in another order in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("width", [6, 24])
def test_results_of_transposed_inputs_lie_as_promised(width):
    """Also where there are no kernels."""
    stream, branch, branch_bias, weight, bias, _ = inputs((3, 5, width))
    stream, branch = transposed(stream), transposed(branch)
    mean, scale = torch.randn(2, 15, device=DEVICE)
    for op, arguments in (
        (ops.add_norm, (stream, branch, branch_bias, weight, bias, None, 1.0, 1e-5)),
        (ops.add_norm_backward, (stream, branch, stream, weight, mean, scale, None, 1.0, True)),
        (ops.add, (stream, branch, branch_bias, None, 1.0)),
        (ops.bias_gelu, (stream, bias)),
        (ops.bias_gelu_backward, (stream, branch, bias)),
    ):
        assert set(torch.library.opcheck(op.default, arguments, test_utils=("test_faketensor",)).values()) == {"SUCCESS"}


def test_vectors_of_any_strides(kernels):
    """As of a weight that is a column of another tensor."""
    stream, branch, branch_bias, weight, bias, _ = inputs((3, 5, 24))
    vectors = [torch.stack((x, x), 1)[:, 0] for x in (branch_bias, weight, bias)]
    assert not any(x.is_contiguous() for x in vectors)
    found = ops.add_norm(stream, branch, *vectors, None, 1.0, 1e-5)
    for one, wanted in zip(found, ops.add_norm(stream, branch, branch_bias, weight, bias, None, 1.0, 1e-5)):
        assert torch.equal(one, wanted)


CHANGES = [{}, {"dropout": 0.4}, {"norm": "rms"}, {"dropout": 0.4, "norm": "rms"}, {"recompute": "on", "dropout": 0.4}]
MODERN = {"norm": "rms", "qk_norm": True, "embedding": "rotary", "last_bytes": 3}


def loss_and_gradients(made):
    torch.manual_seed(3)
    loss = made.loss(some_bytes())
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in made.named_parameters()}}


@pytest.mark.parametrize("changes", [*CHANGES, MODERN, {**MODERN, "recompute": "on", "dropout": 0.4}], ids=str)
def test_a_fused_network_is_the_plain_one(changes, monkeypatch):
    plain = loss_and_gradients(model(precision="float64", **changes).double())
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())
    with Ran() as ran:
        fused = loss_and_gradients(model(precision="float64", **changes).double())
    again = 2 if "recompute" in changes else 1  # Of each block, both norms.
    assert ran.ops.count("longstride_model.add_norm") == 6 * again
    assert ran.ops.count("longstride_model.add_norm_backward") == 6
    torch.testing.assert_close(fused, plain)


def assert_blocks_compile(changes):
    """Without a graph break, and with the same loss and gradients."""
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        made = model(layers=2, **changes)
        for block in made.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        losses.append(loss_and_gradients(made))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_fused_blocks_compile_without_a_graph_break(changes, fused):
    assert_blocks_compile(changes)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_only_rms_norms_are_left_to_the_compiler(norm, fused):
    torch._dynamo.reset()
    code = []

    def backend(graph, _):
        code.extend(module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
        return graph.forward

    made = model(layers=2, norm=norm)
    for block in made.blocks:
        block.compile(fullgraph=True, backend=backend)
    made.hidden(some_bytes())
    assert ("add_norm" in "".join(code)) == (norm == "layer")


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("recompute", ["on", "selective"])
def test_recomputation_in_a_fused_network(recompute, norm, fused):
    found = [loss_and_gradients(model(dropout=0.3, recompute=how, norm=norm)) for how in ("off", recompute)]
    torch.testing.assert_close(*found)


def test_recomputation_ends_before_the_last_product(fused):
    """Of two blocks and the output layer: the products of dropout are those of a network without it."""
    counts = []
    for rate in (0.0, 0.3):
        loss = model(layers=2, dropout=rate, recompute="on").loss(some_bytes())
        with Ran() as ran:
            loss.backward()
        counts.append([ran.ops.count(name) for name in ("aten.mm", "aten.addmm")])
    assert counts[0] == counts[1]


def test_a_bias_is_summed_by_no_other_kernel(fused):
    made = model(layers=1)
    loss = made.loss(some_bytes())
    with Ran() as ran:
        loss.backward()
    assert ran.ops.count("longstride_model.add_norm_backward") == 2
    assert ran.ops.count("longstride_model.add_backward") == 1
    assert ran.ops.count("longstride_model.bias_gelu_backward") == 1
    assert ran.ops.count("longstride_model.linear_backward") == 4


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gelu_is_one_operator_each_way(norm, fused):
    with Ran() as ran:
        model(layers=1, norm=norm).loss(some_bytes()).backward()
    names = ["longstride_model.bias_gelu", "longstride_model.bias_gelu_backward"]
    assert [ran.ops.count(name) for name in names] == [1, 1]
    assert not {"aten.sigmoid", "aten.silu_backward"} & set(ran.ops)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("recompute", "additions"), [("off", 1), ("2*off + on", 2), ("off + on + off", 3)])
def test_a_block_leaves_its_last_addition_to_the_next(recompute, additions, norm, fused):
    """But for the last block, and where either of the two is recomputed."""
    made = model(layers=3, recompute=recompute, norm=norm)
    with Ran() as ran:
        made.hidden(some_bytes())
    with Ran() as embedding:
        made.embedding(some_bytes())
    assert ran.ops.count("longstride_model.add_norm") == 6
    plain = "aten.add.Tensor"  # Without a bias.
    counts = [run.ops.count("longstride_model.add" if norm == "layer" else plain) for run in (ran, embedding)]
    assert counts[0] - counts[1] == additions


def test_hooks_of_blocks_see_the_stream(fused):
    made, seen = model(layers=3), []
    made.blocks[1].register_forward_hook(lambda block, inputs, output: seen.append((inputs[4], output)))
    result = made.hidden(some_bytes())
    assert seen[0][0] is None
    assert seen[0][1].shape == result.shape


def test_hooks_before_a_block_see_the_stream(fused):
    made, seen = model(layers=2), []
    with torch.no_grad():
        stream = made.blocks[0](made.embedding(some_bytes()))
    made.blocks[1].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    made.hidden(some_bytes())
    torch.testing.assert_close(seen[0], stream)


def test_a_hook_may_change_the_gradient_of_the_stream(fused):
    """All of it: also what goes to the feed-forward network of the block before."""
    made = model(layers=2)
    made.blocks[1].register_full_backward_hook(lambda block, d_inputs, _: (0 * d_inputs[0], *d_inputs[1:]))
    made.loss(some_bytes()).backward()
    assert made.blocks[1].ff.outer.weight.grad.any()
    assert not made.blocks[0].ff.outer.weight.grad.any()


def test_a_feed_forward_network_is_called_where_it_has_hooks_or_is_wrapped(fused):
    class Wrapped(torch.nn.Module):
        def __init__(self, ff):
            super().__init__()
            self.wrapped = ff

        def forward(self, h, x, dropout=None):
            return self.wrapped(h, x, dropout)

    made, seen = model(layers=3), []
    expected = made.hidden(some_bytes())
    made.blocks[0].ff.register_forward_hook(lambda ff, inputs, output: seen.append(output))
    made.blocks[1].ff = Wrapped(made.blocks[1].ff)
    torch.testing.assert_close(made.hidden(some_bytes()), expected)
    assert len(seen) == 1


@pytest.mark.parametrize("norm", [Norm(24).double(), RootMeanSquareNorm()], ids=["layer", "rms"])
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_stream_and_its_norm_may_have_no_gradient(used, norm, fused):
    h = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(residual.normalize(h, norm)[used].square().sum(), h)
    plain = torch.autograd.grad((h, norm(h))[used].square().sum(), h)
    torch.testing.assert_close(ours, plain)


def test_a_second_derivative_is_refused(fused):
    made = model(layers=1)
    gradients = torch.autograd.grad(made.loss(some_bytes()), made.blocks[0].norm_ff.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradients[0].sum().backward()


def test_without_gradients_the_modules_run(fused):
    made = model().eval()
    with torch.no_grad(), Ran() as ran:
        made(some_bytes())
    assert not [name for name in ran.ops if name.startswith("longstride_model")]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_has_gradients_in_the_dtype_of_its_weights(dtype, has_bias, fused, kernels):
    torch.manual_seed(5)
    layer = layers.Linear(24, 36, bias=has_bias).to(DEVICE)
    if has_bias:
        torch.nn.init.normal_(layer.bias)
    x, slope = (torch.randn(3, 50, size, device=DEVICE).to(dtype) for size in (24, 36))

    def gradients(apply, layer, x):
        x = x.detach().requires_grad_()
        value = apply(x, layer)
        return [value.detach(), *torch.autograd.grad(value, (x, *layer.parameters()), slope.to(x.dtype))]

    with Ran() as ran:
        ours = gradients(residual.linear, layer, x)
    assert "longstride_model.linear_backward" in ran.ops
    plain = gradients(lambda x, layer: layer(x), layer, x)
    exact = gradients(lambda x, layer: layer(x), copy.deepcopy(layer).double(), x.double())
    for our, same, true in zip(ours, plain, exact):
        assert our.dtype == same.dtype
        distance, allowed = ((found.double() - true).abs().max().item() for found in (our, same))
        assert distance <= 2 * allowed + 32 * torch.finfo(torch.float32).eps * true.abs().max().item()


@pytest.mark.parametrize("norm", [Norm(64), RootMeanSquareNorm()], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_half_precision_are_float32(dtype, norm, fused):
    torch.manual_seed(5)
    norm, layer = copy.deepcopy(norm).to(DEVICE), layers.Linear(64, 256, bias=False).to(DEVICE)
    weights = list(norm.parameters())
    if weights:
        torch.nn.init.normal_(norm.weight)
    h, slope = torch.randn(3, 50, 64, device=DEVICE).to(dtype), torch.randn(3, 50, 256, device=DEVICE).to(dtype)

    def results(apply, norm, layer, h):
        h = h.detach().requires_grad_()
        value = apply(h, norm, layer)
        return [
            value.detach(),
            *torch.autograd.grad(value, (h, *norm.parameters(), layer.weight), slope.to(value.dtype)),
        ]

    with Ran() as ran:
        ours = results(residual.logits, norm, layer, h)
    assert {f"longstride_model.{name}" for name in ("add_norm", "float32_product", "linear_backward")} <= set(ran.ops)
    assert [x.dtype for x in ours] == [torch.float32, dtype, *[torch.float32] * (1 + len(weights))]
    plain = results(lambda h, norm, layer: layer(norm(h)), norm, layer, h)
    exact = results(
        lambda h, norm, layer: layer(norm(h)), copy.deepcopy(norm).double(), copy.deepcopy(layer).double(), h.double()
    )
    for our, same, true in zip(ours, plain, exact):
        distance, allowed = ((found.double() - true).abs().max().item() for found in (our, same))
        assert distance <= 2 * allowed
    with torch.no_grad():  # Evaluation rounds nothing.
        assert torch.equal(residual.logits(h, norm, layer), layer(norm(h.float())))


class Adapted(torch.nn.Module):
    """A layer with an adapter, which shows the weight of the layer as its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, torch.nn.Parameter(torch.tensor(3.0))

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        return self.scale * self.layer(x)


def test_logits_of_another_output_layer(fused):
    """One with an adapter, with a bias or with a hook is called."""
    norm, h = Norm(16), torch.randn(2, 3, 16).bfloat16()
    adapted, shifted, hooked = (
        Adapted(layers.Linear(16, 8, bias=False)),
        layers.Linear(16, 8),
        layers.Linear(16, 8, bias=False),
    )
    hooked.register_forward_hook(lambda layer, inputs, output: 2 * output)
    for layer in (adapted, shifted, hooked):
        assert torch.equal(residual.logits(h, norm, layer), layer(norm(h.float())))
    layer = layers.Linear(16, 8, bias=False)
    for hooked in (Norm(16), RootMeanSquareNorm()):
        hooked.register_forward_hook(lambda norm, inputs, output: 2 * output)
        assert torch.equal(residual.logits(h, hooked, layer), layer(hooked(h.float())))


def test_logits_of_no_position(fused):
    norm, layer, h = Norm(16), layers.Linear(16, 8, bias=False), torch.randn(2, 0, 16).bfloat16().requires_grad_()
    made = residual.logits(h, norm, layer)
    made.sum().backward()
    assert made.shape == (2, 0, 8)
    assert h.grad.shape == h.shape
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("recompute", ["off", "on", "parts"])
def test_a_float32_network_under_autocast(recompute, norm, fused):
    made = model(layers=1, recompute=recompute, norm=norm)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.loss(some_bytes())
    loss.backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in made.parameters())


def test_a_product_that_keeps_its_bias():
    layer, x = layers.Linear(8, 12), torch.randn(3, 8)
    torch.nn.init.normal_(layer.bias)
    value, bias = residual.product(x, layer)
    assert bias is None
    assert torch.equal(value, layer(x))
    assert torch.equal(residual.linear(x, layer), layer(x))


def test_plain_functions():
    h, x, norm = torch.randn(2, 5, 16), torch.randn(2, 5, 16), Norm(16)
    stream, normalized = residual.add_and_normalize(h, Product(x, None), norm)
    assert torch.equal(stream, h + x)
    assert torch.equal(normalized, norm(h + x))
    seed = torch.tensor(4)
    mask = dropout.draw_mask(x, 0.25, seed)
    torch.testing.assert_close(residual.add(h, Product(x, None), Dropout(0.25, seed)), h + x * mask / 0.75)
