import pytest
import torch

from longstride.attention import api
from longstride.model import inspection
from longstride.model.inspection import inspect_attention
from tests.model.small import model, some_bytes

PLACED = [
    "dense()",
    "local(5)",
    "column(4)",
    "dilated(3, 9)",
    "block(6)",
    "summary(8, 2)",
    "interleave(strided(4))",
    "distinct(merged(fixed(8, 2)))",
    "heads(local(3), summary(8, 2, 1))",
]


def small(pattern, **changes):
    """Weights that are far from even: the initial ones are small."""
    made = model(pattern=pattern, **changes).double().eval()
    for block in made.blocks:
        torch.nn.init.normal_(block.attention.query_key_value.weight)
    return made


def by_the_oracle(made, tokens, position):
    """Dense scores under the n x n mask, for every layer and head: a row of the whole matrix."""
    rows = []
    h = made.embedding(tokens[None]).to(getattr(torch, made.config.precision))
    for number, block in enumerate(made.blocks):
        attention = block.attention
        q, k, v = (
            part.unflatten(-1, (made.config.heads, -1)).transpose(1, 2)
            for part in attention.query_key_value(block.norm_attention(h)).split(attention.sizes, -1)
        )
        masks = torch.stack([pattern.mask(len(tokens)) for pattern in made.config.patterns(number)])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~masks, float("-inf"))
        whole = scores.softmax(-1).nan_to_num(0)  # A query that sees nothing.
        rows.append(whole[0, :, position, : position + 1])
        a = attention.project((whole @ v).transpose(1, 2).flatten(2))
        h = block.ff(h + a, block.norm_ff(h + a))
    return torch.stack(rows), made.logits(h)[0, position].softmax(-1)


@pytest.mark.parametrize("position", [0, 1, 7, 13, 23])
@pytest.mark.parametrize("pattern", PLACED)
def test_weights_are_the_oracles(pattern, position):
    made, tokens = small(pattern, precision="float64"), some_bytes(1)[0]
    with torch.no_grad():
        expected, probabilities = by_the_oracle(made, tokens, position)
    found = inspect_attention(made, tokens, position)
    assert found.weights.shape == (3, 2, position + 1)
    torch.testing.assert_close(found.weights, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.probabilities, probabilities)
    for layer, rows in enumerate(found.weights):
        for head, row in zip(made.config.patterns(layer), rows):
            sees = head.mask(24)[position, : position + 1]
            assert (row[~sees] == 0).all()
            assert row.sum().item() == pytest.approx(1.0 if sees.any() else 0.0)


def test_a_query_that_sees_nothing_looks_nowhere():
    found = inspect_attention(small("summary(8, 2)", precision="float64"), some_bytes(1)[0], 5)
    assert (found.weights == 0).all()
    assert found.probabilities.isfinite().all()


def test_some_layers_and_heads_in_the_order_they_are_named():
    made, tokens = small("interleave(strided(4))", precision="float64"), some_bytes(1)[0]
    whole = inspect_attention(made, tokens, 17).weights
    part = inspect_attention(made, tokens, 17, layers=[2, 0], heads=[1]).weights
    assert torch.equal(part, whole[[2, 0]][:, [1]])


def test_what_comes_later_is_not_looked_at():
    made, tokens = small("dense()", precision="float64"), some_bytes(1)[0]
    other = torch.cat([tokens[:9], 255 - tokens[9:]])
    assert torch.equal(inspect_attention(made, tokens, 9).weights, inspect_attention(made, other, 9).weights)
    assert not torch.equal(inspect_attention(made, tokens, 10).weights, inspect_attention(made, other, 10).weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_softmax_is_float32(precision):
    made = model(pattern="dense()", precision=precision)
    found = inspect_attention(made, some_bytes(1)[0], 20)
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3, 2))


def test_dropout_rests_and_the_mode_comes_back():
    made = model(dropout=0.5).train()
    first, second = (inspect_attention(made, some_bytes(1)[0], 20).weights for _ in range(2))
    assert torch.equal(first, second)
    assert made.training


def test_no_square_is_computed(monkeypatch):
    """At 4,096 positions one head's square would be 64 MiB; what is made in `last_row` stays far below."""
    largest = 0
    row = inspection.last_row

    def measured(q, k, patterns):
        nonlocal largest

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), named=None):
                nonlocal largest
                made = function(*arguments, **(named or {}))
                if isinstance(made, torch.Tensor):
                    largest = max(largest, made.numel())
                return made

        with Sizes():
            return row(q, k, patterns)

    monkeypatch.setattr(inspection, "last_row", measured)
    made = model(pattern="interleave(strided(64))", context=4096, embedding="matrix(64)", layers=1)
    inspect_attention(made, some_bytes(1, 4096)[0], 4095)
    assert 0 < largest <= 4096 * 16


def test_other_attention_can_stand_in():
    made, x = model(), torch.randn(1, 24, 16)
    attention = made.blocks[0].attention
    given = []

    def dense(q, k, v):
        given.append((q.shape, k.shape, v.shape))
        return api.attend(q, k, v, attention.patterns, impl="reference")

    torch.testing.assert_close(attention(x, attend=dense).value, attention(x).value)
    torch.testing.assert_close(made.blocks[0](x, attend=dense), made.blocks[0](x))
    assert given == [((1, 2, 24, 8),) * 3] * 2
    assert not torch.allclose(attention(x, attend=lambda q, k, v: v).value, attention(x).value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"position": 24}, "position must be 0 to 23, got 24"),
        ({"position": -1}, "position must be at least 0, got -1"),
        ({"layers": [3]}, "layers must be 0 to 2, got 3"),
        ({"heads": [0, 2]}, "heads must be 0 to 1, got 2"),
        ({"layers": [1, 1]}, "layers must be one or more different ones"),
        ({"heads": []}, "heads must be one or more different ones"),
        ({"tokens": some_bytes(2)}, r"tokens must be one sequence \[n\], got \[2, 24\]"),
    ],
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        inspect_attention(model(), **{"tokens": some_bytes(1)[0], "position": 3, **arguments})
