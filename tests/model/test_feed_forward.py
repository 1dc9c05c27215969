"""The feed-forward network with gelu inside its products: operators, kernels and networks, against plain PyTorch."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from longstride.model import feed_forward, layers, product_ops, residual
from tests.attention.error_rule import Ran
from tests.model.small import model, some_bytes
from tests.model.test_residual import CHANGES, assert_blocks_compile, loss_and_gradients

HOPPER = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)
SHARED_MEMORY = 232_448
CASES = [
    ((1, 512, 2048), torch.bfloat16, True),
    ((1000, 512, 2048), torch.float16, False),
    ((20_001, 512, 256), torch.bfloat16, False),
    ((3, 7, 64, 128), torch.float16, True),
    ((2, 777, 256, 512), torch.bfloat16, True),
    ((300, 320, 640), torch.bfloat16, True),
]
"""Rows, width and inner width; dtype; and whether there is a bias."""
ops = torch.ops.longstride_model


@pytest.fixture
def fused(monkeypatch):
    """Models take the operators on a CPU, too, which compute them in plain PyTorch there."""
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(feed_forward, "is_fused", lambda *_: True)


def inputs(shape, dtype, device="cpu"):
    """x, weight and bias of the first layer, weight of the second, and the gradient of its result."""
    *rows, width, inner = shape
    generator = torch.Generator().manual_seed(len(shape))

    def some(*shape):
        return torch.randn(shape, generator=generator)

    x, d_output, weights = some(*rows, width), some(*rows, width), (some(inner, width), some(width, inner))
    weights = [x / width**0.5 for x in weights]
    return [x.to(device, dtype) for x in (x, weights[0])] + [some(inner).to(device), weights[1].to(device, dtype), d_output]


def ours(x, weight_1, bias, weight_2):
    return feed_forward._FeedForward.apply(x, weight_1, bias, weight_2)


def plain(x, weight_1, bias, weight_2):
    z = F.linear(x, weight_1, None if bias is None else bias.to(x.dtype))
    return F.linear(z * torch.sigmoid(1.702 * z), weight_2)


def results(function, tensors, d_output):
    """The result, and the gradients of all tensors."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    value = function(*leaves)
    there = [x for x in leaves if x is not None]
    return [value.detach(), *torch.autograd.grad(value, there, d_output.to(value.device, value.dtype))]


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_operators_in_plain_pytorch(with_bias):
    *tensors, d_output = inputs((3, 5, 8, 24), torch.float64)
    tensors[2] = tensors[2].double() if with_bias else None
    with Ran() as ran:
        found = results(ours, tensors, d_output)
    assert {"longstride_model.product_gelu", "longstride_model.product_gelu_backward"} <= set(ran.ops)
    for our, expected in zip(found, results(plain, tensors, d_output)):
        torch.testing.assert_close(our, expected)


@pytest.mark.parametrize("flag", [True, False])
def test_operators_keep_the_rules_of_pytorch(flag):
    x, weight, bias, weight_2, d_output = inputs((3, 5, 8, 24), torch.float32)
    for op, arguments in (
        (ops.product_gelu, (x, weight, bias, flag)),
        (ops.product_gelu, (x, weight, None, flag)),
        (ops.product_gelu_backward, (d_output, weight_2, torch.rand(3, 5, 24), flag)),
    ):
        checked = torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checked.values()) == {"SUCCESS"}, op


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_fused_network_is_the_plain_one(changes, monkeypatch):
    plain = loss_and_gradients(model(precision="float64", **changes).double())
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(feed_forward, "is_fused", lambda *_: True)
    with Ran() as ran:
        fused = loss_and_gradients(model(precision="float64", **changes).double())
    assert "longstride_model.product_gelu_backward" in ran.ops
    assert not [name for name in ran.ops if "bias_gelu" in name]
    torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_fused_blocks_compile_without_a_graph_break(changes, fused):
    assert_blocks_compile(changes)


@pytest.mark.parametrize("recompute", ["on", "selective", "parts"])
def test_recomputation_in_a_fused_network(recompute, fused):
    with Ran() as ran:
        found = [loss_and_gradients(model(dropout=0.3, recompute=how)) for how in ("off", recompute)]
    assert ran.ops.count("longstride_model.product_gelu_backward") == 2 * 3
    torch.testing.assert_close(*found)


def test_a_second_derivative_is_refused():
    leaves = [x.requires_grad_() for x in inputs((3, 8, 24), torch.float32)]
    gradients = torch.autograd.grad(ours(*leaves[:4]), leaves[0], leaves[4], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradients[0].sum().backward()


def test_where_products_are_fused(monkeypatch):
    """On a Hopper GPU, for the dtypes and widths of the kernels."""
    gpu, linear, half = torch.device("cuda:0"), layers.Linear(512, 2048, device="meta"), torch.bfloat16
    assert not feed_forward.is_fused(torch.device("cpu"), half, linear)
    for hopper in (False, True):
        monkeypatch.setattr(product_ops, "_on_hopper", lambda device, hopper=hopper: hopper)
        assert feed_forward.is_fused(gpu, half, linear) == hopper
    assert not feed_forward.is_fused(gpu, torch.float32, linear)
    for width, inner in ((512, 2048 + 64), (100, 128), (32, 128), (576, 2304)):
        assert not feed_forward.is_fused(gpu, half, layers.Linear(width, inner, device="meta"))


def test_without_gradients_the_modules_run(fused):
    made = model().eval()
    with torch.no_grad(), Ran() as ran:
        made(some_bytes())
    assert not [name for name in ran.ops if name.startswith("longstride_model")]


@pytest.mark.parametrize(
    "shape", [(1000, 512, 2048), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 64, 128), (777, 256, 512)))]
)
def test_kernels_compile(shape):
    """For what is launched: it fits into a multiprocessor, without spills, and products overlap with arithmetic."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.product_dry_run", json.dumps([[*shape, "bfloat16"]])],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout)[0]
    both = ["gelu_product", "gelu_product_gradient"]
    assert [one["kernel"] for one in launched] == [*both, "sum_rows", *both]
    for one in launched:
        if one["kernel"] != "sum_rows":
            assert not one["serialized"], one
            assert one["stack"] <= 64, one
            assert one["shared"] <= SHARED_MEMORY, one


def assert_close_to_exact(found, same, exact):
    """At most twice as far from float64 as plain PyTorch in this dtype, and a few roundings."""
    for number, (our, other, true) in enumerate(zip(found, same, exact)):
        distance, allowed = ((x.double() - true).abs().max().item() for x in (our, other))
        rounding = 32 * torch.finfo(torch.float32).eps + torch.finfo(our.dtype).eps / 2
        assert distance <= 2 * allowed + rounding * true.abs().max().item(), number


@HOPPER
@pytest.mark.parametrize(("shape", "dtype", "with_bias"), CASES, ids=str)
def test_kernels_against_float64(shape, dtype, with_bias, poisoned):
    *tensors, d_output = inputs(shape, dtype, "cuda")
    tensors[2], d_output = tensors[2] if with_bias else None, d_output.to("cuda", dtype)
    assert product_ops.takes(d_output.device, dtype, *shape[-2:])
    found, again, same = (results(function, tensors, d_output) for function in (ours, ours, plain))
    assert_close_to_exact(found, same, results(plain, [None if x is None else x.double() for x in tensors], d_output))
    assert all(torch.equal(one, other) for one, other in zip(found, again))
    x, weight, bias, *_ = tensors
    assert torch.equal(ops.product_gelu(x, weight, bias, False)[0], ops.product_gelu(x, weight, bias, True)[0])


@HOPPER
@pytest.mark.parametrize("changes", [{}, {"recompute": "on"}, {"norm": "rms"}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_network_on_a_gpu(compiled, changes, monkeypatch):
    """Its gradients are at most twice as far from those in float64 as plain PyTorch's are."""
    from longstride.model import product_kernels

    launches, launch = [], product_kernels.product_gelu_backward
    monkeypatch.setattr(product_kernels, "product_gelu_backward", lambda *given: launches.append(launch(*given)))
    exact = all_gradients(model(width=128, precision="float64", **changes).double())
    made = model(width=128, precision="bfloat16", **changes).cuda()
    torch._dynamo.reset()
    for block in made.blocks if compiled else ():
        block.compile(fullgraph=True)
    ours = all_gradients(made)
    assert len(launches) == len(made.blocks)
    monkeypatch.setattr(residual, "is_fused", lambda x: False)
    monkeypatch.setattr(feed_forward, "is_fused", lambda *_: False)
    plain = all_gradients(model(width=128, precision="bfloat16", **changes).cuda())
    assert len(launches) == len(made.blocks)
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def all_gradients(made):
    made.loss(some_bytes().to(made.output.weight.device)).backward()
    return torch.cat([x.grad.double().cpu().flatten() for x in made.parameters()])


def test_the_slope_is_the_derivative_of_gelu():
    x, weight, bias, *_ = inputs((4, 8, 24), torch.float64)
    slope = ops.product_gelu(x, weight, bias, True)[1]
    torch.testing.assert_close(slope, layers.gelu_gradient(torch.ones_like(slope), F.linear(x, weight, bias.double())))
