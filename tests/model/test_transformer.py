from math import log, sqrt
from pathlib import Path

import pytest
import torch
from torch import nn

from longstride import attend
from longstride.model import PRESETS, SparseTransformer, preset, transformer
from longstride.model.layers import gelu
from tests.attention.error_rule import Ran
from tests.model.small import config, model, some_bytes


def test_the_equations():
    """H_k = H_(k-1) + a + b, written out."""
    made = model(qk_ratio=0.5, ff_ratio=2.0, pattern="heads(local(4), column(4))")
    tokens = some_bytes()
    h = made.embedding(tokens)
    for block in made.blocks:
        x = norm(block.norm_attention, h)
        weight, bias = block.attention.query_key_value.weight, block.attention.query_key_value.bias
        q, k, v = (part.view(2, 24, 2, -1).transpose(1, 2) for part in (x @ weight.T + bias).split([8, 8, 16], -1))
        mixed = attend(q, k, v, block.attention.patterns, impl="reference").transpose(1, 2).reshape(2, 24, 16)
        a = mixed @ block.attention.project.weight.T + block.attention.project.bias
        x = norm(block.norm_ff, h + a)
        inner = x @ block.ff.inner.weight.T + block.ff.inner.bias
        b = (inner * torch.sigmoid(1.702 * inner)) @ block.ff.outer.weight.T + block.ff.outer.bias
        h = h + a + b
    torch.testing.assert_close(made.hidden(tokens), norm(made.norm, h))
    torch.testing.assert_close(made(tokens), norm(made.norm, h) @ made.output.weight.T)


def norm(module, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias


def test_gelu():
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)
    assert torch.equal(gelu(x), x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("name", PRESETS)
def test_the_future_changes_nothing(name):
    """Byte t shows from the prediction of t + 1 on and nowhere before, with the preset's patterns at a smaller size."""
    full = preset(name)
    made = model(
        heads=full.heads,
        width=4 * full.heads,
        layers=2 * len(full.cycle),
        context=512,
        pattern=full.pattern,
        embedding="matrix(32)",
    )
    tokens = some_bytes(1, 300)
    before = made(tokens)
    for t in (0, 1, 130, 299):
        changed = tokens.clone()
        changed[0, t] ^= 1
        after = made(changed)
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        if t + 1 < 300:
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


def test_recomputation_keeps_less():
    kept = {}
    for how in ("off", "selective", "on"):
        made = model(recompute=how, layers=8, width=32)
        before = made.embedding(some_bytes()).untyped_storage().nbytes()
        count = 0

        def pack(x):
            nonlocal count
            count += x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            made.hidden(some_bytes())
        kept[how] = count / before
    assert kept["on"] < kept["off"] / 4
    assert kept["selective"] < kept["off"] / 2


def test_selective_recomputation_does_not_attend_again():
    ran = {}
    for how in ("on", "selective"):
        loss = model(recompute=how).loss(some_bytes())
        with Ran() as during_backward:
            loss.backward()
        ran[how] = "longstride.blocked_forward" in during_backward.ops
    assert ran == {"on": True, "selective": False}


def test_dropout_is_at_the_end_of_each_addition_alone():
    made = model(dropout=0.5, layers=1)
    drops = [name for name, module in made.named_modules() if isinstance(module, nn.Dropout)]
    assert drops == ["blocks.0.dropout"]
    tokens = some_bytes()
    assert not torch.equal(made(tokens), made(tokens))
    made.eval()
    assert torch.equal(made(tokens), made(tokens))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_within_the_rule(precision):
    """At most twice as far from float32 as the same network with every tensor cast and plain modules."""
    tokens = some_bytes()
    exact = model()(tokens)
    ours = model(precision=precision)(tokens)
    plain = model().to(getattr(torch, precision))
    plain.config.__dict__["precision"] = precision
    theirs = plain(tokens)
    assert ours.dtype == torch.float32
    allowed = 2 * (theirs.float() - exact).abs().max() + torch.finfo(getattr(torch, precision)).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed


def test_weights_and_their_gradients_are_float32():
    made = model(precision="bfloat16")
    made.loss(some_bytes()).backward()
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in made.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in made.parameters())


DEPTHS = [16, 128, pytest.param(512, marks=pytest.mark.slow)]


def deep(layers):
    return model(layers=layers, width=32, pattern="dense()", init="release")


def test_depth_leaves_activations_alone():
    sizes = []
    with torch.no_grad():
        for layers in (16, 128, 512):
            made = deep(layers)
            h = made.embedding(some_bytes())
            for block in made.blocks:
                h = h + block(h)
            sizes.append(h.square().mean().sqrt().item())
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize("layers", DEPTHS)
def test_every_layer_gets_a_gradient_of_the_same_order(layers):
    made = deep(layers)
    made.loss(some_bytes()).backward()
    for name in ("attention.query_key_value", "attention.project", "ff.inner", "ff.outer"):
        sizes = [block.get_submodule(name).weight.grad.norm().item() for block in made.blocks]
        assert 0 < max(sizes) < 10 * min(sizes), name


@pytest.mark.parametrize("layers", DEPTHS)
def test_deep_networks_train(layers):
    """Eight bytes of 256: a few steps are enough to see it, at any depth and with one learning rate."""
    made = model(layers=layers, width=32, pattern="dense()", output=False)
    tokens = some_bytes(8) % 8
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    bits = []
    for _ in range(6):
        loss = made.loss(tokens)
        bits.append(loss.item() / log(2))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    assert bits[0] == pytest.approx(8)
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 5.5


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"must be whole numbers \[batch, n\], got torch.int64 \[3\]"),
        (torch.zeros(1, 3), "must be whole numbers"),
        (torch.zeros(1, 25, dtype=torch.long), "n must be from 1 to context = 24, got 25"),
        (torch.zeros(1, 0, dtype=torch.long), "n must be from 1 to context = 24, got 0"),
    ],
)
def test_wrong_bytes_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        model()(tokens)


def test_the_forward_is_one_short_file():
    assert len(Path(transformer.__file__).read_text().splitlines()) <= 250
