"""Queries and keys normalised and rotated in one pass: the operators and kernels beside the definition, and a network."""

import pytest
import torch

from longstride.model import query_key, residual
from longstride.model.rotary import rotation
from tests.attention.error_rule import Ran
from tests.model.test_modern import ALL, filled, some_bytes

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
SHAPES = {
    "plain": (2, 7, 2, 8, 8),
    "wide values": (1, 40, 3, 6, 12),
    "one pair": (3, 5, 1, 2, 2),
    "many rows": (2, 300 if GPU else 35, 4, 64, 64),
    "narrow values": (1, 9, 4, 80, 40),
}
"""Batch, n, heads, d_qk and d_v."""
KINDS = {"both": (True, True), "rotated": (True, False), "normalised": (False, True)}


@pytest.fixture
def kernels(monkeypatch, poisoned):
    """The operators run their kernels; without a GPU in Triton's interpreter."""
    monkeypatch.setattr(query_key, "_run_kernels", lambda packed: packed.dtype in residual.DTYPES)


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())


def case(shape, kind, dtype=torch.float32):
    batch, n, heads, d_qk, d_v = shape
    rotated, normalised = kind
    packed = torch.randn(batch, n, heads * (2 * d_qk + d_v), device=DEVICE).to(dtype)
    angles = rotation(torch.arange(n, device=DEVICE), d_qk) if rotated else None
    scale = 1 + torch.randn(heads, device=DEVICE) / 2 if normalised else None
    return packed, angles, scale, d_qk, heads


def definition(packed, angles, scale, d_qk, heads):
    width = heads * d_qk
    q, k = (x.unflatten(-1, (heads, d_qk)).transpose(1, 2) for x in packed[..., : 2 * width].split(width, -1))
    q, k = query_key.normalize_and_rotate(q, k, angles, scale)
    parts = [x.transpose(1, 2).flatten(2).to(packed.dtype) for x in (q, k)]
    return torch.cat((*parts, packed[..., 2 * width :]), -1)


def results(function, packed, angles, scale, d_qk, heads, rounded=torch.float32):
    """The packed result, and the gradients of the packed tensor and of the scale, from rounded slopes."""
    leaves = [packed.detach().requires_grad_()] + ([] if scale is None else [scale.detach().requires_grad_()])
    made = function(leaves[0], angles, leaves[1] if scale is not None else None, d_qk, heads)
    slopes = torch.randn(made.shape, generator=torch.Generator().manual_seed(3)).to(packed.device, torch.float32)
    return [made.detach(), *torch.autograd.grad(made, leaves, slopes.to(rounded).to(made.dtype))]


def assert_as_near_as_the_definition(given):
    packed, angles, scale, d_qk, heads = given
    found = results(query_key.normalize_and_rotate_packed, *given, packed.dtype)
    plain = results(definition, *given, packed.dtype)
    wide = packed.double(), None if angles is None else angles.double(), None if scale is None else scale.double()
    exact = results(definition, *wide, d_qk, heads, packed.dtype)
    for our, same, true in zip(found, plain, exact):
        assert (our.dtype, our.shape) == (same.dtype, same.shape)
        distance, allowed = ((near.double() - true).abs().max().item() for near in (our, same))
        assert distance <= 2 * allowed + 32 * torch.finfo(torch.float32).eps * true.abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels(shape, kind, dtype, kernels):
    assert_as_near_as_the_definition(case(shape, kind, dtype))


@pytest.mark.skipif(GPU, reason="for a CPU")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_operators_without_kernels(shape, kind):
    assert_as_near_as_the_definition(case(shape, kind))


def test_a_slice_of_a_wider_tensor_and_zeros(kernels):
    """Views have strides of their own; a head of zeros has no direction, and a scale of 0 none either."""
    packed, angles, scale, d_qk, heads = case(SHAPES["plain"], (True, True))
    wider = torch.cat((packed, packed), -1)
    wider[0, 3, :d_qk] = 0
    scale[1] = 0
    view = wider[..., : packed.shape[-1]]
    found = results(query_key.normalize_and_rotate_packed, view, angles, scale, d_qk, heads)
    for one, wanted in zip(found, results(definition, view, angles, scale, d_qk, heads)):
        assert one.isfinite().all()
        torch.testing.assert_close(one, wanted)


def test_angles_and_scales_of_any_strides(kernels):
    """As of a parametrized scale, one for all heads, and of a slice of longer angles."""
    packed, angles, scale, d_qk, heads = case(SHAPES["plain"], (True, True))
    longer = torch.cat((angles, angles), 1)[:, : packed.shape[1]]
    assert not longer.is_contiguous()
    found = query_key.normalize_and_rotate_packed(packed, longer, scale[:1].expand(heads), d_qk, heads)
    wanted = query_key.normalize_and_rotate_packed(packed, angles, scale[:1].repeat(heads), d_qk, heads)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("changes", [ALL, {"embedding": "rotary"}, {"qk_norm": True}], ids=str)
def test_a_network_has_the_results_and_gradients_of_the_definition(changes, fused, monkeypatch):
    made = filled(qk_ratio=0.5, **changes).to(DEVICE)
    tokens = some_bytes().to(DEVICE)

    def run():
        made.zero_grad()
        with Ran() as ran:
            loss = made.loss(tokens)
            loss.backward()
        return [loss.detach(), *(x.grad.clone() for x in made.parameters())], ran.ops

    fused_results, ops = run()
    names = {"longstride_model.normalize_and_rotate", "longstride_model.normalize_and_rotate_backward"}
    assert names <= set(ops)
    monkeypatch.setattr(query_key, "is_fused", lambda *_: False)
    plain, ops = run()
    assert not names & set(ops)
    for x, y in zip(fused_results, plain):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_definition_is_kept_where_kernels_do_not_fit(fused):
    packed = torch.randn(1, 4, 40)
    assert query_key.is_fused(packed, 8)
    assert not query_key.is_fused(packed, 6)  # Values of 40 - 24 columns are no heads of 6.
    assert not query_key.is_fused(packed, 5)  # No pairs.
    assert not query_key.is_fused(packed[:0], 8)
    widest = query_key.MOST_COLUMNS
    assert query_key.is_fused(torch.randn(1, 1, 3 * widest), widest)
    assert not query_key.is_fused(torch.randn(1, 1, 3 * (widest + 2)), widest + 2)
    with torch.autocast("cpu"):
        assert not query_key.is_fused(packed, 8)


def test_the_definition_is_left_to_the_compiler(fused):
    torch._dynamo.reset()
    code = []

    def backend(graph, _):
        code.extend(module.code for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
        return graph.forward

    made = filled(**ALL)
    for block in made.blocks:
        block.compile(fullgraph=True, backend=backend)
    made.hidden(some_bytes())
    assert code
    assert "normalize_and_rotate" not in "".join(code)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_operators_are_registered_right(kind):
    packed, angles, scale, d_qk, heads = case(SHAPES["plain"], kind)
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.longstride_model
    torch.library.opcheck(ops.normalize_and_rotate, (packed, angles, scale, d_qk, heads), test_utils=tests)
    slopes = torch.randn_like(packed)
    torch.library.opcheck(
        ops.normalize_and_rotate_backward, (slopes, packed, angles, scale, d_qk, heads), test_utils=tests
    )  # fmt: skip
