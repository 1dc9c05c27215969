"""Cached decoding against the parallel forward pass."""

from dataclasses import replace

import pytest
import torch

from longstride.model import PRESETS, SparseTransformer, preset
from longstride.sampling import decoder
from longstride.sampling.decoder import Decoder, in_float32
from longstride.sampling.position import HalfProduct, PackedProduct, Product, can_halve, can_pack, fits_half
from longstride.sampling.streams import choose_implementation, open_streams
from tests.model.small import model, some_bytes
from tests.model.test_modern import CHANGES as MODERN
from tests.model.test_modern import filled

PLACEMENTS = [
    "dense()",
    "interleave(strided(5))",
    "merged(strided(5))",
    "column(6) + 3*local(6)",
    "interleave(fixed(6, 2))",
    "merged(fixed(6, 2))",
    "distinct(merged(fixed(6, 2)))",
    "heads(local(4), summary(6, 2))",
    "local(3) | block(5) | summary(7, 3)",
    "interleave(grid(27, 3))",
]


def check(made, tokens, prompt, first=None, last=None):
    """Positions from `first` to `last`, after the bytes before are taken in at once."""
    first, last = prompt if first is None else first, tokens.shape[1] if last is None else last
    with torch.no_grad():
        wanted = made.eval()(tokens)
    decoder = Decoder(made, len(tokens))
    decoder.prefill(tokens[:, :prompt])
    for position in range(prompt, last):
        found = decoder.step(tokens[:, position - 1] if position else None)
        if position >= first:
            assert (found - wanted[:, position]).abs().max() < 1e-4
            assert torch.equal(found.argmax(-1), wanted[:, position].argmax(-1))


def wide_model():
    """Its matrices are large enough to be packed."""
    made = model(layers=1, width=640, heads=2, context=20)
    torch.nn.init.normal_(made.output.weight, std=0.1)
    return made


def check_with_threads(made, threads):
    """Its logits are those of the parallel pass, and do not depend on the number of streams."""
    before, tokens = torch.get_num_threads(), some_bytes(5, 20)
    torch.set_num_threads(threads)
    try:
        check(made, tokens, 3)
        check_equal_for_any_number_of_streams(made, tokens)
    finally:
        torch.set_num_threads(before)


def check_equal_for_any_number_of_streams(made, tokens):
    """The logits of the first stream, alone and among all, after a prompt of 3 bytes."""
    found = []
    for batch in (1, len(tokens)):
        decoder = Decoder(made, batch)
        decoder.prefill(tokens[:batch, :3])
        found.append([decoder.step(tokens[:batch, at])[0] for at in range(3, tokens.shape[1])])
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize("prompt", [0, 1, 13])
@pytest.mark.parametrize("pattern", PLACEMENTS)
def test_equals_the_parallel_pass_at_every_position(pattern, prompt):
    """47 is no multiple of a stride, and further than any ring goes round."""
    made = model(pattern=pattern, context=47, layers=4)
    check(made, some_bytes(2, 47), prompt)


@pytest.mark.parametrize("pattern", ["interleave(fixed(72, 4))", "summary(72, 4)"])
def test_before_any_head_sees_a_key(pattern):
    """The slots of the first 64 positions are listed together, and the first summary cell comes after them."""
    made = model(pattern=pattern, context=76, layers=2)
    check(made, some_bytes(2, 76), 0)
    assert Decoder(made, 1, length=3).step(None).isfinite().all()


@pytest.mark.parametrize("changes", [{"qk_ratio": 0.5}, {"ff_ratio": 2.0}, {"width": 24, "heads": 3}, {"dropout": 0.5}])
def test_whatever_the_sizes(changes):
    check(model(**changes), some_bytes(), 5)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_around_the_ends_of_their_strides(name):
    """With fewer blocks and narrower ones, at the strides that they have."""
    whole = preset(name)
    sizes = {"layers": max(2, len(whole.cycle)), "width": 8 * whole.heads, "precision": "float32"}
    stride = whole.positions.sizes[-1] if len(whole.positions.sizes) == 2 else 128
    context = 2 * stride + 9
    torch.manual_seed(0)
    made = SparseTransformer(replace(whole, **sizes, context=context, embedding=f"matrix({stride})"))
    torch.nn.init.normal_(made.output.weight)
    tokens = some_bytes(1, context)
    for around in (stride, 2 * stride):
        check(made, tokens, around - 4, last=around + 5)


def test_half_precision_rounds_weights_and_nothing_else():
    made = model(precision="bfloat16")
    exact = in_float32(made)
    assert exact.config.precision == "float32"
    rounded = exact.blocks[0].attention.query_key_value.weight
    assert torch.equal(rounded, made.blocks[0].attention.query_key_value.weight.bfloat16().float())
    assert torch.equal(exact.output.weight, made.output.weight)
    assert torch.equal(exact.embedding.token.weight, made.embedding.token.weight)
    tokens = some_bytes()
    with torch.no_grad():
        wanted = exact(tokens)
    decoder = Decoder(made, 2)
    assert decoder.cache.values[0].dtype == torch.bfloat16
    decoder.prefill(tokens[:, :9])
    found = decoder.step(tokens[:, 8])
    assert (found - wanted[:, 9]).abs().max() < 0.05  # Values are rounded in the cache.
    stepwise = Decoder(made, 2)
    for position in range(10):
        last = stepwise.step(tokens[:, position - 1] if position else None)
    assert (found - last).abs().max() < 1e-4


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="needs oneDNN")
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products_round_alike_for_any_number_of_rows(bias):
    layer = torch.nn.Linear(192, 300, bias=bias)
    packed, plain, x = PackedProduct(layer, 1.7), Product(layer, 1.7), torch.randn(64, 192)
    h = torch.randn(64, 300)
    with torch.no_grad():
        for product in (plain, packed):
            torch.testing.assert_close(product(x), 1.7 * layer(x))
        added = {}
        for product in (plain, packed):
            product.add_to(added.setdefault(product, h.clone()), x)
        torch.testing.assert_close(added[packed], added[plain])
        for rows in (2, 3, 4, 7, 8, 33):
            assert torch.equal(packed(x[:rows]), packed(x)[:rows])


@pytest.mark.skipif(not can_halve(torch.device("cpu")), reason="needs FBGEMM")
@pytest.mark.parametrize("bias", [True, False])
def test_products_with_float16_weights_are_those_of_float32(bias):
    """The error against float64 is at most twice that of PyTorch's product; rows do not depend on their number."""
    layer, x, h = torch.nn.Linear(192, 300, bias=bias), torch.randn(64, 192), torch.randn(64, 300)
    layer.weight.data = layer.weight.data.bfloat16().float()
    half, plain = HalfProduct(layer, 1.7), Product(layer, 1.7)
    with torch.no_grad():
        exact, added = 1.7 * layer.double()(x.double()), h.clone()
        layer.float()
        half.add_to(added, x)
        without_bias = exact - (0 if layer.bias is None else 1.7 * layer.bias)
        for found, wanted in ((half(x), exact), (added, h + without_bias + (0 if layer.bias is None else layer.bias))):
            assert (found - wanted).abs().max() <= 2 * (plain(x) - exact).abs().max() + 2**-24 * wanted.abs().max()
        for rows in (1, 2, 3, 4, 7, 8, 33):
            assert torch.equal(half(x[:rows]), half(x)[:rows])


def test_which_weights_fit_float16():
    """Those of float16 and bfloat16, of any size; not those of float32, with one that dwarfs the others, or not finite."""
    weight = 0.05 * torch.randn(256, 256)
    for size in (2.0**-30, 1, 2.0**30):
        assert fits_half(size * weight.bfloat16().float())
        assert fits_half(size * weight.half().float())
        assert not fits_half(size * weight)
    assert fits_half(torch.zeros(4, 4))
    uneven = weight.bfloat16().float()
    uneven[3, 5] = 2.0**40  # Scaled for it, all others are 0.
    assert not fits_half(uneven)
    assert not fits_half(torch.full((4, 4), torch.nan))
    assert not fits_half(torch.full((4, 4), torch.inf))
    assert not fits_half(torch.full((4, 4), 2.0**-149))


@pytest.mark.skipif(not can_halve(torch.device("cpu")), reason="needs FBGEMM")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_network_with_float16_weights(threads):
    made = wide_model()
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert isinstance(Decoder(made).network.blocks[0].inner, HalfProduct)
    assert Decoder(made).network.h.shape[0] == 1
    check_with_threads(made, threads)


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="needs oneDNN")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_network_that_is_packed(threads):
    made = wide_model()
    assert isinstance(Decoder(made).network.blocks[0].inner, PackedProduct)
    check_with_threads(made, threads)


def test_what_is_given_is_not_changed():
    made = model(dropout=0.3)
    before = {name: x.clone() for name, x in made.state_dict().items()}
    check(made, some_bytes(), 3)
    made.train()
    Decoder(made).step(None)
    assert made.training
    assert all(torch.equal(x, made.state_dict()[name]) for name, x in before.items())


def test_lists_of_what_is_seen_are_short_where_much_is_seen(monkeypatch):
    """In as little memory as there is, one position at a time; with the same result."""
    made, tokens = model(pattern="dense()"), some_bytes()
    found = []
    for listed in (2**27, 1):
        monkeypatch.setattr(decoder, "LISTED", listed)
        streams = Decoder(made, 2)
        found.append(torch.stack([streams.step(tokens[:, at - 1] if at else None) for at in range(6)]))
        assert len(streams.network.ahead) == (24 if listed > 1 else 1)
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_rounding_does_not_depend_on_the_number_of_streams():
    """On a CPU the rows of few streams are padded."""
    made, tokens = filled(context=47, pattern="merged(fixed(6, 2)) + local(5)", **MODERN[-1]), some_bytes(11, 47)
    together = Decoder(made, 11)
    alone = [Decoder(made, 1) for _ in tokens]
    for position in range(12):
        last = tokens[:, position - 1] if position else None
        wanted = together.step(last)
        for row, streams in enumerate(alone):
            assert torch.equal(streams.step(None if last is None else last[row, None])[0], wanted[row])


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 13])
@pytest.mark.parametrize("changes", MODERN, ids=str)
def test_networks_beyond_the_papers(changes, prompt):
    """The cache has rotated and normalised keys; the first positions have fewer bytes before them than are embedded."""
    check(filled(context=47, pattern="merged(fixed(6, 2)) + local(5)", **changes), some_bytes(2, 47), prompt)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_plain_decoding_of_networks_beyond_the_papers(device):
    settings = filled(**MODERN[-1]).config
    name, reason = choose_implementation(settings, 1, torch.device(device))
    assert name == "pytorch"
    if device == "cuda":
        assert reason.startswith(
            "since the sampling kernels know the paper's network only, and this one has embedding = rotary"
        )


@pytest.mark.parametrize("name", ["resident", "batched"])
def test_kernels_refuse_networks_beyond_the_papers(name):
    says = f"^sampling: the {name} kernels know the paper's network only, and this one has qk_norm = True; use .*'pytorch'$"
    with pytest.raises(ValueError, match=says):
        open_streams(model(qk_norm=True), 1, 24, name)


@pytest.mark.parametrize("changes", [{}, {"last_bytes": 3, "embedding": "rotary"}, {"pattern": "merged(fixed(4, 1))"}])
def test_reordered_streams_go_on_from_each_other(changes):
    made, given, rows = model(**changes), some_bytes(3, 9), torch.tensor([2, 0, 2])
    decoder = Decoder(made, 3)
    decoder.prefill(given[:, :6])
    decoder.step(given[:, 5])
    decoder.reorder(rows)
    expected = made(torch.cat([given[rows, :7], given[:, 7:]], 1))
    for position in (7, 8):
        last = given[rows, 6] if position == 7 else given[:, 7]
        assert torch.allclose(decoder.step(last), expected[:, position], atol=1e-5)
