import pytest
import torch

from longstride.model import embedding
from longstride.model.embedding import Embedding, Table
from tests.model.small import config, model, some_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_slot_carries_the_byte_before_it_and_its_own_position():
    made: Embedding = model(context=12, embedding="image(2, 2, 3)").embedding
    tokens = some_bytes(1, 12)
    found = made(tokens)[0]
    for slot, (row, column, channel) in {0: (0, 0, 0), 1: (0, 0, 1), 7: (1, 0, 1), 11: (1, 1, 2)}.items():
        before = made.start if slot == 0 else made.token.weight[tokens[0, slot - 1]]
        place = made.position
        there = place["row"].weight[row] + place["column"].weight[column] + place["channel"].weight[channel]
        torch.testing.assert_close(found[slot], before + there)


def test_a_shorter_sequence_is_a_prefix():
    made = model().embedding
    tokens = some_bytes()
    assert torch.equal(made(tokens)[:, :7], made(tokens[:, :7]))


def test_any_kind_of_whole_numbers():
    made = model().embedding
    tokens = some_bytes()
    assert torch.equal(made(tokens), made(tokens.to(torch.uint8)))


def test_dimensions_have_names():
    assert list(Embedding(config()).position) == ["row", "column"]


@pytest.fixture
def products(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(embedding, "uses_products", lambda weight: torch.is_grad_enabled())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"last_bytes": 3},
        {"norm": "rms", "last_bytes": 2},
        {"precision": "bfloat16"},
        {"precision": "float16"},
        {"norm": "rms", "precision": "bfloat16"},
    ],
    ids=str,
)
def test_gradients_are_those_of_pytorch(changes, products, monkeypatch):
    made, tokens = model(**changes), some_bytes()
    torch.nn.init.normal_(made.output.weight)
    found = {}
    for name in ("product", "pytorch"):
        made.zero_grad()
        made.loss(tokens).backward()
        found[name] = {key: x.grad for key, x in made.embedding.named_parameters()}
        monkeypatch.setattr(embedding, "uses_products", lambda weight: False)
    assert found["product"]["token.weight"].any()
    assert found["product"].keys() == {"start", "token.weight"} | found["pytorch"].keys()
    for name, x in found["product"].items():
        torch.testing.assert_close(x, found["pytorch"][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_sequences_shorter_than_the_last_bytes(n, products, monkeypatch):
    made = model(last_bytes=4, norm="rms").embedding
    tokens, slopes, found = some_bytes(2, n), torch.randn(2, n, 16), []
    for _ in range(2):
        made.zero_grad()
        h = made(tokens)
        h.backward(slopes)
        found.append([h.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in made.parameters())])
        monkeypatch.setattr(embedding, "uses_products", lambda weight: False)
    for ours, wanted in zip(*found):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_a_table_of_positions_and_one_byte(products):
    """A sequence of one byte looks nothing up but its position."""
    made = model()
    torch.nn.init.normal_(made.output.weight)
    made.loss(some_bytes(2, 1)).backward()
    assert not made.embedding.token.weight.grad.any()
    assert made.embedding.position["row"].weight.grad[0].all()
    assert not made.embedding.position["row"].weight.grad[1:].any()


def test_a_table_that_something_else_replaces_is_called(products):
    made, calls = model(precision="bfloat16"), []

    class Other(torch.nn.Module):
        def forward(self, index):
            calls.append(index.shape)
            return torch.ones(*index.shape, made.config.width)

    made.embedding.token = Other()
    made.loss(some_bytes())
    assert len(calls) == 1


def test_frozen_tables_and_inference_look_up_alone():
    table = Table(4, 3, device=DEVICE)
    index = torch.tensor([1, 3, 1], device=DEVICE)
    with torch.no_grad():
        assert table(index).grad_fn is None
    table.weight.requires_grad_(False)
    assert table(index).grad_fn is None
    assert torch.equal(table(index, torch.bfloat16), table.weight[index])


def test_a_hook_sees_what_is_looked_up(products):
    made, seen = model(), []
    made.embedding.token.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    made.loss(some_bytes()).backward()
    assert len(seen) == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("changes", [{}, {"norm": "rms", "last_bytes": 3}], ids=str)
def test_gradients_of_many_indices_repeat_their_bits(changes):
    """PyTorch's do not."""
    made = model(width=64, context=8192, precision="bfloat16", embedding="matrix(64)", **changes).cuda()
    torch.nn.init.normal_(made.output.weight)
    tokens = some_bytes(8, 8192).cuda()
    found = []
    for _ in range(4):
        made.zero_grad()
        made.loss(tokens).backward()
        found.append([x.grad.clone() for x in made.embedding.parameters()])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other))


def test_under_torch_compile(products):
    made, tokens = model(last_bytes=2), some_bytes()
    made.loss(tokens).backward()
    wanted = [x.grad for x in made.embedding.parameters()]
    made.zero_grad()
    torch.compile(made.loss, fullgraph=True, backend="aot_eager")(tokens).backward()
    torch.compiler.reset()
    for x, gradient in zip(made.embedding.parameters(), wanted):
        torch.testing.assert_close(x.grad, gradient)
