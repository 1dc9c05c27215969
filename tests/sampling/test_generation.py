from importlib import import_module
from math import log

import pytest
import torch

from longstride.sampling import generate
from longstride.sampling.decoder import Decoder, TorchStreams
from longstride.sampling.params import SamplingParams
from longstride.sampling.sampler import probabilities, random_state, uniform
from tests.model.small import model, some_bytes


def whole(pieces):
    rows = list(zip(*pieces))
    return [b"".join(row) for row in rows]


def test_same_seed_same_samples_whatever_the_batch():
    made = model(pattern="distinct(merged(fixed(6, 2)))", context=64)
    together = whole(generate(made, [b""] * 11, seed=5))
    alone = [whole(generate(made, [b""], seed=5, first=number))[0] for number in range(11)]
    threes = [
        sample for start in (0, 3, 6, 9) for sample in whole(generate(made, [b""] * min(3, 11 - start), seed=5, first=start))
    ]
    assert together == alone == threes
    assert len(set(together)) == 11
    assert whole(generate(made, [b""] * 11, seed=6)) != together


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_prompts_of_different_lengths_are_continued_as_if_alone(precision):
    made = model(context=40, precision=precision)
    prompts = [b"", b"abcdefg", b"xyz"]
    together = whole(generate(made, prompts, 20, seed=1))
    assert [len(sample) for sample in together] == [20, 20, 20]
    for number, prompt in enumerate(prompts):
        assert whole(generate(made, [prompt], 20, seed=1, first=number)) == [together[number]]


@pytest.mark.parametrize("size", [1, 5, 128])
def test_pieces_that_are_asked_for_ahead(size, monkeypatch):
    """As on a GPU: each once, in order, until the end."""
    made = model(context=40)
    prompts = [b"", b"abcdefg", b"xyz"]
    one_by_one = whole(generate(made, prompts, 23, seed=1))
    asked = []
    make = TorchStreams.extend

    def noted(self, steps, *rest):
        asked.append(self.position)
        return make(self, steps, *rest)

    monkeypatch.setattr(TorchStreams, "extend", noted)
    monkeypatch.setattr(TorchStreams, "is_async", True)
    monkeypatch.setattr(import_module("longstride.sampling.generation"), "piece_size", lambda device: size)
    pieces = generate(made, prompts, 23, seed=1)
    first = next(pieces)
    assert asked == [0, size][: -(-30 // size)]
    assert whole([first, *pieces]) == one_by_one
    assert asked == list(range(0, 30, size))


def test_goes_as_far_as_the_context():
    made = model(context=24)
    assert [len(sample) for sample in whole(generate(made, [b"abc", b""]))] == [21, 24]


def test_beyond_the_context_the_window_slides():
    made = model(pattern="distinct(merged(fixed(6, 2)))", context=24)
    prompts = [b"", b"abcdefg", b"xyz"]
    together = whole(generate(made, prompts, 60, seed=1))
    assert [len(sample) for sample in together] == [60, 60, 60]
    assert whole(generate(made, prompts, 60, seed=1)) == together
    assert whole(generate(made, prompts, 60, seed=2)) != together
    for number, prompt in enumerate(prompts):  # The same as alone, and as one that ends earlier.
        assert whole(generate(made, [prompt], 60, seed=1, first=number)) == [together[number]]
        assert whole(generate(made, [prompt], 31, seed=1, first=number)) == [together[number][:31]]


@pytest.mark.parametrize("changes", [{}, {"embedding": "rotary", "last_bytes": 3}], ids=str)
def test_each_window_begins_with_the_last_half_of_the_one_before(changes):
    made = model(context=24, **changes)
    (sample,) = whole(generate(made, [b"ab"], 60, top_k=1))
    text = b"ab" + sample
    assert whole(generate(made, [b"ab"], top_k=1)) == [text[2:24]]
    for start in (12, 24):
        assert whole(generate(made, [text[start : start + 12]], top_k=1)) == [text[start + 12 : start + 24]]
    assert whole(generate(made, [text[36:48]], 12, top_k=1)) == [text[48:60]]
    assert len(text) == 62


def test_random_numbers_are_those_of_the_position_in_the_whole_sample(monkeypatch):
    module, seen = import_module("longstride.sampling.decoder"), []
    pick = module.pick_bytes
    monkeypatch.setattr(module, "pick_bytes", lambda chances, uniform: seen.append(uniform) or pick(chances, uniform))
    list(generate(model(context=24), [b""], 40, seed=3))
    slid = [float(x) for x in seen]
    seen.clear()
    list(generate(model(context=64), [b""], 40, seed=3))
    assert slid == [float(x) for x in seen]
    assert slid == [float(uniform(random_state(3, torch.zeros(1, dtype=torch.int64)), position)) for position in range(40)]


def test_an_image_has_no_next_window():
    made = model(context=24, embedding="image(2, 4, 3)")
    with pytest.raises(ValueError, match="length = 22 after a prompt of 3 bytes is more than an image, which has 24"):
        generate(made, [b"abc"], 22)


def test_takes_the_most_likely_byte():
    made = model(context=24)
    (sample,) = whole(generate(made, [b"ab"], top_k=1))
    tokens = torch.tensor([list(b"ab" + sample)])
    with torch.no_grad():
        assert made(tokens)[0, 2:].argmax(-1).tolist() == list(sample)


def test_the_chain_rule():
    """Bits of the decoded steps together are those of the parallel pass."""
    made = model(pattern="distinct(merged(fixed(6, 2)))", context=47)
    tokens = some_bytes(1, 47)
    decoder = Decoder(made)
    bits = 0.0
    for position in range(47):
        logits = decoder.step(tokens[:, position - 1] if position else None)
        bits -= float(probabilities(logits, SamplingParams())[0, tokens[0, position]].log2())
    with torch.no_grad():
        wanted = float(made.nats(tokens).double().sum()) / log(2)
    assert bits == pytest.approx(wanted, rel=1e-6)


def test_samples_are_as_likely_as_the_network_says():
    """Of two bytes, all pairs are counted."""
    made = model(context=24)
    with torch.no_grad():
        made.output.weight[4:] = 0
        made.output.weight[:4] *= 3
    prompts = [b"q"] * 3000
    pairs = whole(generate(made, prompts, 1, top_k=4, seed=2))
    with torch.no_grad():
        likely = probabilities(made(torch.tensor([list(b"qq")]))[:, 1], SamplingParams(top_k=4))[0]
    expected = likely / likely.sum() * 3000
    counts = torch.tensor([pair[0] for pair in pairs]).bincount(minlength=256)
    there = expected > 0
    assert (counts[~there] == 0).all()
    assert ((counts - expected)[there] ** 2 / expected[there]).sum() < 16.3  # 3 degrees of freedom


def test_nothing_is_asked_for_nothing():
    assert list(generate(model(), [])) == []


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        ([b"x" * 24], {}, "prompt 0 has 24 bytes, and the context is 24: give at most 23"),
        ([b"", b"x" * 30], {}, "prompt 1 has 30 bytes"),
        ([b"abc"], {"length": 0}, "length"),
        (b"ab", {}, "prompts must be a list of bytes, got b'ab'; put it into a list"),
        ("ab", {}, "prompts must be a list of bytes, got 'ab'; put it into a list"),
        ([97], {}, "prompts must be a list of bytes; prompt 0 is 97"),
        (["ab"], {}, "prompts must be a list of bytes; prompt 0 is 'ab', which .encode\\(\\) makes bytes"),
        ([b"abc"], {"temperature": 0}, "temperature must be at least 0.001"),
        ([b"abc"], {"top_p": 2.0}, "top_p"),
        ([b"abc"], {"seed": 1.5}, "seed must be a whole number of 64 bits, got 1.5"),
        ([b"abc"], {"seed": 2**64}, "seed must be a whole number of 64 bits, got 18446744073709551616"),
        ([b"abc"], {"first": -1}, "first must be at least 0, got -1"),
        ([b"abc"], {"first": 2**63}, "first must be at most"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(prompts, given, message):
    with pytest.raises(ValueError, match=message):
        generate(model(), prompts, **given)


def test_logits_that_are_not_finite():
    made = model(layers=1)
    with torch.no_grad():
        made.blocks[0].ff.outer.bias[0] = float("nan")
    with pytest.raises(ValueError, match=r"logits are not finite, at position 2 at the latest.*precision = float32"):
        list(generate(made, [b"ab"], 3))
