"""Networks beyond the paper's: rotary positions, normalised queries and keys, RMS norms, embeddings of the last bytes."""

import json
from math import sqrt

import pytest
import torch
import torch.nn.functional as F

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.inspection import inspect_attention
from longstride.model.layers import rms_norm
from longstride.model.rotary import rotate, rotation
from tests.model.small import config, model, some_bytes

CHANGES = [
    {"embedding": "rotary"},
    {"qk_norm": True},
    {"norm": "rms"},
    {"last_bytes": 3},
    {"embedding": "rotary", "qk_norm": True, "norm": "rms", "last_bytes": 3, "init": "modern"},
]
ALL = CHANGES[-1]


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def turned(x):
    """Pairs as complex numbers, multiplied by exp(i * position * speed)."""
    n, pairs = x.shape[-2], x.shape[-1] // 2
    angle = torch.arange(n).double()[:, None] * 10_000 ** (-torch.arange(pairs).double() / pairs)
    result = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((result.real, result.imag), -1)


def defined(made, weights, tokens):
    """The logits of one sequence, position by position where that is plainest."""
    settings, heads, n, width = made.config, made.config.heads, len(tokens), made.config.width
    is_rms = settings.norm == "rms"

    def norm(x, name):
        return rms(x) if is_rms else F.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    tables = [
        weights["embedding.token.weight"],
        *(weights[f"embedding.earlier.{i}.weight"] for i in range(2) if settings.last_bytes == 3),
    ]
    rows = []
    for slot in range(n):
        row = weights["embedding.start"] if slot == 0 else 0
        for distance, table in enumerate(tables, 1):
            if slot >= distance:
                row = row + table[tokens[slot - distance]]
        if settings.embedding != "rotary":
            row = (
                row
                + weights["embedding.position.row.weight"][slot // 4]
                + weights["embedding.position.column.weight"][slot % 4]
            )
        rows.append(row)
    h = torch.stack(rows)
    h = rms(h) if is_rms else h
    for index in range(settings.layers):
        here = f"blocks.{index}."
        parts = linear(norm(h, f"{here}norm_attention"), f"{here}attention.query_key_value").split(
            made.blocks[index].attention.sizes, -1
        )
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in parts)
        if settings.qk_norm:
            q, k = 3 * weights[f"{here}attention.query_scale"][:, None, None] * rms(q), rms(k)
        if settings.embedding == "rotary":
            q, k = turned(q), turned(k)
        mask = torch.stack([pattern.mask(n) for pattern in settings.patterns(index)])
        scores = (q @ k.mT / sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        h = h + linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{here}attention.project")
        inner = linear(norm(h, f"{here}norm_ff"), f"{here}ff.inner")
        h = h + linear(inner * torch.sigmoid(1.702 * inner), f"{here}ff.outer")
    return linear(norm(h, "norm"), "output")


def filled(seed=0, **changes):
    """A network whose weights are all different from their initial zeros and ones, so that each shows."""
    made = model(seed, **changes)
    with torch.no_grad():
        for x in made.parameters():
            x += 0.2 * torch.randn_like(x)
    return made


@pytest.mark.parametrize("recompute", ["off", "on"])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_logits_and_every_gradient_are_those_of_the_definition(changes, recompute):
    made = filled(qk_ratio=0.5, precision="float64", recompute=recompute, **changes).double()
    weights = {name: x.detach().clone().requires_grad_() for name, x in made.named_parameters()}
    tokens = some_bytes(2, 23)
    wanted = torch.stack([defined(made, weights, row) for row in tokens])
    with torch.no_grad():
        torch.testing.assert_close(made(tokens), wanted, rtol=0, atol=1e-11)
    made.loss(tokens).backward()
    F.cross_entropy(wanted.flatten(0, 1), tokens.flatten()).backward()
    for name, x in made.named_parameters():
        assert x.grad is not None, name
        assert x.grad.abs().max() > 0, name
        torch.testing.assert_close(x.grad, weights[name].grad, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_sequences_are_prefixes(changes, n):
    made = filled(**changes)
    tokens = some_bytes()
    torch.testing.assert_close(made(tokens[:, :n]), made(tokens)[:, :n])


def test_a_rotation_depends_on_the_distance_only():
    q, k = torch.randn(2, 8)
    far = torch.tensor([3, 1_000_003])
    early, late = (rotation(far + shift, 8) for shift in (0, 917_504))
    products = [rotate(q, r[:, :1]) @ rotate(k, r[:, 1:]).mT for r in (early, late)]
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-5)


def test_the_root_mean_square_of_half_precision_is_that_of_float32():
    x = 100 * torch.randn(7, 300, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x), rms_norm(x.float()).bfloat16())


def test_modern_initial_weights():
    made = SparseTransformer(config(layers=2, width=256, heads=4, **ALL))
    wanted = {
        "embedding.start": 0.3,
        "embedding.": 0.3 / sqrt(3),
        "query_key_value": 0.5 / 16,
        "inner": 0.5 / 16,
        "output": 0.02,
    }
    for name, x in made.named_parameters():
        if "project" in name or "outer" in name:
            assert (x == 0).all()
        elif name.endswith("query_scale"):
            assert (x == 1).all()
        else:
            deviation = next(value for part, value in wanted.items() if part in name)
            assert abs(x.std().item() / deviation - 1) < 5 / sqrt(2 * x.numel()), name
    assert not [name for name, _ in made.named_parameters() if "bias" in name or "norm" in name]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_parameters_in_closed_form(changes):
    made = SparseTransformer(config(qk_ratio=0.5, **changes))
    assert made.parameter_count() == made.config.parameters


def test_saved_and_loaded(tmp_path):
    made = filled(**ALL)
    made.save_pretrained(tmp_path)
    again = SparseTransformer.from_pretrained(tmp_path)
    assert again.config == made.config
    assert torch.equal(again(some_bytes()), made(some_bytes()))


def test_the_fields_of_an_older_config_are_the_papers():
    written = json.loads(config().to_json())
    for name in ("norm", "qk_norm", "last_bytes"):
        del written[name]
    read = ModelConfig.from_fields(written)
    assert read == config()
    assert read.beyond_the_paper == []
    assert config(**ALL).beyond_the_paper == ["embedding", "norm", "qk_norm", "last_bytes"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"embedding": "rotary", "heads": 16}, "embedding = 'rotary' needs an even size of queries per head, got 1"),
        ({"last_bytes": 0}, "last_bytes must be at least 1, got 0"),
        ({"last_bytes": 1000}, "last_bytes .*256"),
        ({"qk_norm": 1}, "qk_norm must be true or false, got 1"),
        ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
        ({"embedding": "rotary(3)"}, "must be matrix"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(changes, says):
    with pytest.raises(ValueError, match=f"^config: .*{says}"):
        config(**changes)


def test_inspected_weights_are_those_of_the_definition():
    made = filled(pattern="dense()", layers=1, **ALL)
    tokens = some_bytes(1, 20)[0]
    weights = {name: x.detach() for name, x in made.named_parameters()}
    h = made.embedding(tokens[None])[0]
    parts = F.linear(rms(h), weights["blocks.0.attention.query_key_value.weight"]).split(16, -1)
    q, k, _ = (part.unflatten(-1, (2, -1)).transpose(0, 1).double() for part in parts)
    q, k = turned(3 * weights["blocks.0.attention.query_scale"][:, None, None] * rms(q)), turned(rms(k))
    wanted = torch.einsum("hd,hnd->hn", q[:, 14], k[:, :15]) / sqrt(8)
    found = inspect_attention(made, tokens, 14)
    torch.testing.assert_close(found.weights[0].double(), wanted.softmax(-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.probabilities, made(tokens[None])[0, 14].softmax(-1))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_half_precision_is_near(precision):
    made = filled(precision=precision, **ALL)
    exact = SparseTransformer(config(precision="float64", **ALL))
    exact.load_state_dict(made.state_dict())
    assert made.hidden(some_bytes()).dtype == getattr(torch, precision)
    assert (made.loss(some_bytes()) - exact.loss(some_bytes())).abs() < (1e-5 if precision == "float32" else 0.02)
