from math import log, sqrt
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.model import PRESETS, SparseTransformer, feed_forward, layers, preset, transformer
from longstride.model.dropout import draw_mask
from longstride.model.layers import Norm
from longstride.patterns import Dilated
from tests.attention.error_rule import Ran
from tests.model.small import config, model, some_bytes

MODERN = {"embedding": "rotary", "qk_norm": True, "norm": "rms", "last_bytes": 3}


def dropped(x, dropout, seed):
    mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - dropout, generator=torch.Generator().manual_seed(seed))
    return x * mask / (1 - dropout)


def written_out(made, tokens, dtype, dropout=0.0):
    """The equations, with plain functions and masks, every tensor of one dtype."""
    weights = {name: x.to(dtype) for name, x in made.named_parameters()}
    linear = {name[:-7]: (x, weights.get(f"{name[:-7]}.bias")) for name, x in weights.items() if name.endswith(".weight")}
    width = made.config.width
    h = made.embedding(tokens).to(dtype)
    seeds = torch.randint(2**63 - 1, (len(made.blocks), 2)).tolist()
    for index, block in enumerate(made.blocks):
        here = f"blocks.{index}."
        x = F.layer_norm(h, (width,), *linear[f"{here}norm_attention"], 1e-5)
        parts = F.linear(x, *linear[f"{here}attention.query_key_value"]).split(block.attention.sizes, -1)
        q, k, v = (part.unflatten(-1, (made.config.heads, -1)).transpose(1, 2) for part in parts)
        mask = torch.stack([pattern.mask(tokens.shape[1]) for pattern in block.attention.patterns])
        scores = (q @ k.transpose(-1, -2) / sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        a = dropped(F.linear(mixed, *linear[f"{here}attention.project"]), dropout, seeds[index][0])
        x = F.layer_norm(h + a, (width,), *linear[f"{here}norm_ff"], 1e-5)
        inner = F.linear(x, *linear[f"{here}ff.inner"])
        b = dropped(F.linear(inner * torch.sigmoid(1.702 * inner), *linear[f"{here}ff.outer"]), dropout, seeds[index][1])
        h = h + a + b
    return F.linear(F.layer_norm(h, (width,), *linear["norm"], 1e-5), weights["output.weight"])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_equations(dropout):
    made = model(qk_ratio=0.5, ff_ratio=2.0, pattern="heads(local(4), column(4))", dropout=dropout, precision="float64")
    tokens = some_bytes()
    torch.manual_seed(5)
    ours = made(tokens)
    torch.manual_seed(5)
    torch.testing.assert_close(ours, written_out(made, tokens, torch.float64, dropout), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*PRESETS, "text-small-dense"])
def test_the_future_changes_nothing(name):
    """Byte t shows from the prediction of t + 1 on and nowhere before, with the preset's patterns at a smaller size."""
    full = preset(name)
    stride = max(
        leaf.step if isinstance(leaf, Dilated) else leaf.l
        for leaf in full.patterns(0)[0].leaves + full.patterns(1)[0].leaves
    )
    n = 2 * stride + 44
    made = model(
        heads=full.heads,
        width=2 * full.heads,
        layers=len(full.cycle),
        context=n,
        pattern=full.pattern,
        embedding="matrix(32)",
        precision=full.precision,
    )
    tokens = some_bytes(1, n)
    before = made.hidden(tokens)
    for t in (0, stride + 1, n - 1):
        changed = tokens.clone()
        changed[0, t] ^= 1
        after = made.hidden(changed)
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        if t + 1 < n:
            assert not torch.equal(before[:, t + 1], after[:, t + 1])


def test_heads_and_blocks_have_their_own_patterns():
    made = model(pattern="heads(local(4), column(4)) + dense()")
    shown = [[repr(pattern) for pattern in block.attention.patterns] for block in made.blocks]
    assert shown == [["Local(4)", "Column(4)"], ["Dense()", "Dense()"], ["Local(4)", "Column(4)"]]


@pytest.mark.parametrize("init", ["paper", "release"])
def test_weights_are_as_the_rule_says(init):
    made = SparseTransformer(
        config(layers=8, width=256, heads=4, ff_ratio=2.0, context=4096, init=init, embedding="matrix(64)")
    )
    rule = (lambda fan: 0.125 / sqrt(fan)) if init == "paper" else (lambda fan: sqrt(0.125 / fan))
    smaller = 1 / sqrt(2 * 8)
    expected = {
        "embedding.token.weight": rule(256),
        "embedding.start": rule(256),
        "embedding.position.row.weight": rule(512),
        "embedding.position.column.weight": rule(512),
        "query_key_value.weight": rule(256),
        "project.weight": rule(256) * smaller,
        "inner.weight": rule(256),
        "outer.weight": rule(512) * smaller,
        "output.weight": 0.0,
    }
    for name, parameter in made.named_parameters():
        deviation = next((value for end, value in expected.items() if name.endswith(end)), None)
        if "norm" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        elif name.endswith("bias") or deviation == 0:
            assert (parameter == 0).all()
        else:
            off = 5 / sqrt(2 * parameter.numel())
            assert abs(parameter.std(correction=0).item() / deviation - 1) < off, name
            assert abs(parameter.mean().item()) < 5 * deviation / sqrt(parameter.numel()), name


@pytest.mark.parametrize("recompute", ["on", "selective"])
def test_recomputation_changes_nothing(recompute):
    tokens = some_bytes()
    found = []
    for how in ("off", recompute):
        made = model(dropout=0.3, recompute=how, layers=4)
        torch.manual_seed(7)
        loss = made.loss(tokens)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in made.parameters())])
    assert all(torch.equal(plain, again) for plain, again in zip(*found))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_feed_forward_network_in_parts(dropout, monkeypatch):
    """Parts of eight rows and of seven: as plain autograd, but for the order of sums."""
    monkeypatch.setattr(feed_forward, "PART_BYTES", 8 * 32 * 8)
    inner, outer = layers.Linear(8, 32).double(), layers.Linear(32, 8).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    inputs = x, *inner.parameters(), *outer.parameters()
    mask, scale = draw_mask(x, dropout, torch.tensor(3)), 1 / (1 - dropout)
    assert feed_forward.part_count(3 * 5 * 32 * 8) == 2
    plain = layers.drop(outer(layers.gelu(inner(x))), mask, scale)
    again = feed_forward.recomputed_feed_forward(x, inner, outer, outer.bias, mask, scale)
    torch.testing.assert_close(again, plain)
    slopes = torch.randn_like(plain)
    torch.testing.assert_close(torch.autograd.grad(again, inputs, slopes), torch.autograd.grad(plain, inputs, slopes))


def test_what_is_computed_again():
    ran = {}
    for how in ("off", "on", "selective"):
        loss = model(recompute=how).loss(some_bytes())
        with Ran() as during_backward:
            loss.backward()
        ran[how] = [name in during_backward.ops for name in ("aten.addmm", "longstride.blocked_forward")]
    assert ran == {"off": [False, False], "on": [True, True], "selective": [True, False]}


@pytest.mark.parametrize("dtype", transformer.INTEGER_DTYPES, ids=str)
def test_any_kind_of_whole_numbers(dtype):
    made = model(layers=1)
    tokens = some_bytes()
    assert torch.equal(made(tokens.to(dtype)), made(tokens))


def test_dropout_is_for_training():
    made = model(dropout=0.5, layers=1)
    tokens = some_bytes()
    assert not torch.equal(made(tokens), made(tokens))
    made.eval()
    assert torch.equal(made(tokens), made(tokens))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_within_the_rule(precision):
    """At most twice as far from float64 as the equations with every tensor of that precision: logits, and every gradient."""
    tokens = some_bytes()
    exact, ours, plain = (
        model(layers=6, width=64, precision=one) for one in ("float64", precision, "float32")
    )  # fmt: skip
    found = []
    for made, logits in (
        (exact, written_out(exact, tokens, torch.float64)),
        (ours, ours(tokens)),
        (plain, written_out(plain, tokens, getattr(torch, precision))),
    ):
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        gradients = torch.autograd.grad(loss, list(made.parameters()))
        found.append([x.double() for x in (logits, *gradients)])
    names = ["logits", *(name for name, _ in exact.named_parameters())]
    for name, true, our, theirs in zip(names, *found):
        assert (our - true).norm() <= 2 * (theirs - true).norm(), name


def test_norms_keep_their_weights_whole():
    """A weight that bfloat16 would round to 1 still counts: the results are rounded, and nothing before them."""
    norm, x = Norm(4096), torch.randn(4096).bfloat16()
    nn.init.constant_(norm.weight, 1 + 2**-9)
    found = norm(x)
    assert found.dtype == torch.bfloat16
    exact = F.layer_norm(x.double(), (4096,))
    assert ((found.double() / exact).mean() - 1 - 2**-9).abs() < 2**-11


def test_weights_and_their_gradients_are_float32():
    made = model(precision="bfloat16")
    made.loss(some_bytes()).backward()
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in made.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


DEPTHS = [16, 128, pytest.param(512, marks=pytest.mark.slow)]


def deep(layers, init):
    return model(layers=layers, width=32, pattern="dense()", init=init)


@pytest.mark.parametrize("init", ["paper", "release"])
@pytest.mark.parametrize("depths", [(16, 128), pytest.param((16, 128, 512), marks=pytest.mark.slow)])
def test_depth_leaves_activations_alone(depths, init):
    sizes = []
    with torch.no_grad():
        for layers in depths:
            made = deep(layers, init)
            h = made.embedding(some_bytes())
            for block in made.blocks:
                h = block(h)
            sizes.append(h.square().mean().sqrt().item())
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("init", ["paper", "release"])
@pytest.mark.parametrize("layers", DEPTHS)
def test_every_layer_gets_a_gradient_of_the_same_order(layers, init):
    """Also of the same order as in a network of four layers: W_p's and W_2's, as what follows them is as large there."""
    shallow, made = deep(4, init), deep(layers, init)
    for one in (shallow, made):
        one.loss(some_bytes()).backward()
    for name in ("attention.query_key_value", "attention.project", "ff.inner", "ff.outer"):
        sizes = [block.get_submodule(name).weight.grad.norm().item() for block in made.blocks]
        assert 0 < max(sizes) < 4 * min(sizes), name
        if name in ("attention.project", "ff.outer"):
            few = shallow.blocks[0].get_submodule(name).weight.grad.norm().item()
            assert few / 4 < max(sizes) < 4 * few, name


@pytest.mark.parametrize(
    ("layers", "rate", "steps", "bound"),
    [
        (16, 5e-3, 90, 1.5),
        pytest.param(128, 2e-3, 160, 1.5, marks=pytest.mark.slow),
        pytest.param(512, 1e-3, 60, 4.0, marks=pytest.mark.slow),
    ],
)
def test_deep_networks_train(layers, rate, steps, bound):
    """Two symbols of four, over and over: which comes next only attention knows, as a slot carries the other one.

    Without attention it is 2 bits. The deepest network is given the time to learn which symbols there are.
    """
    made = model(layers=layers, width=32, context=12, pattern="local(2)", output=False)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(made.parameters(), lr=rate)
    bits = []
    for _ in range(steps):
        loss = made.loss(torch.randint(4, (32, 2), generator=generator).repeat(1, 6))
        bits.append(loss.item() / log(2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    assert bits[0] == pytest.approx(8)
    assert sum(bits[-5:]) / 5 < bound


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"must be whole numbers \[batch, n\], got torch.int64 \[3\]"),
        (torch.zeros(1, 3), "must be whole numbers"),
        (torch.zeros(1, 25, dtype=torch.long), "n must be from 1 to context = 24, got 25"),
        (torch.zeros(1, 3, dtype=torch.complex64), "must be whole numbers"),
        (torch.full((1, 3), -100), "bytes must be 0 to 255, got -100 to -100"),
        (torch.full((1, 3), 256), "bytes must be 0 to 255, got 256 to 256"),
        (torch.zeros(1, 0, dtype=torch.long), "n must be from 1 to context = 24, got 0"),
    ],
)
def test_wrong_bytes_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        model()(tokens)


def test_the_forward_is_one_short_file():
    assert len(Path(transformer.__file__).read_text().splitlines()) <= 250


@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_blocks_compile_without_a_graph_break(recompute, changes):
    torch._dynamo.reset()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = model(layers=1, recompute=recompute, context=48, **changes).to(device)
    block, rotation = made.blocks[0], made.embedding.rotation(torch.arange(48, device=device))
    h = torch.randn(2, 48, block.attention.sizes[2], device=device, requires_grad=True)
    inputs = h, *block.parameters()
    expected = torch.autograd.grad(block(h, rotation=rotation).square().sum(), inputs)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(h, rotation=rotation).square().sum(), inputs), expected)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("changes", [{}, MODERN], ids=str)
def test_one_graph_for_torch_compile(changes, dynamic):
    """The look at the bytes' range is left out there: it would break the graph."""
    torch._dynamo.reset()
    made, tokens = model(layers=2, **changes), some_bytes()
    compiled = torch.compile(made, fullgraph=True, backend="eager", dynamic=dynamic)
    assert torch.equal(compiled(tokens), made(tokens))
    loss = torch.compile(made.loss, fullgraph=True, backend="eager", dynamic=dynamic)(tokens)
    assert torch.equal(loss, made.loss(tokens))
    loss.backward()
    assert all(x.grad is not None for x in made.parameters())
    with pytest.raises(ValueError, match="bytes must be 0 to 255"):
        made(tokens.long() + 300)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found = max(self.found, result.nbytes)
        return result


@torch.no_grad()
def test_without_gradients_the_inner_layer_is_computed_in_parts(monkeypatch):
    made, tokens = model(width=16, context=512, dropout=0.3).eval(), some_bytes(2, 512)
    whole = made(tokens)
    inner = 4 * 2 * 512 * 4 * 16
    monkeypatch.setattr(feed_forward, "PART_BYTES", inner // 4)
    torch.testing.assert_close(made(tokens), whole)
    with Largest() as largest:
        made.blocks[0].ff(torch.randn(2, 512, 16), torch.randn(2, 512, 16))
    assert largest.found == inner // 4
