"""Prompts that are read together: each is as if it had been read alone."""

import importlib.util

import pytest
import torch

from longstride.sampling import arrivals
from longstride.sampling.arrivals import LONGEST, MOST_POSITIONS, most_together, padded_length
from longstride.sampling.params import SamplingParams
from longstride.sampling.torch_places import TorchPlaces
from tests.model.small import model
from tests.sampling.test_places import GPU, NETWORKS, alone, arrival, begin, finish

PROMPTS = {3: bytes(range(9)), 0: b"abcdefghijkl", 5: b"abcdefghijk", 1: bytes(range(40, 50)), 7: b"ABCDEFGHIJK"}
"""By place. Places 2, 4 and 6 are free, and the pass has three rows of padding."""


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    """So that contexts of 24 have several."""
    monkeypatch.setattr(arrivals, "SHORTEST", 4)
    monkeypatch.setattr(arrivals, "LONGEST", 16)


def read_together(places, prompts=PROMPTS):
    places.reads_together = True
    return finish(places.join([arrival(place, prompt, place) for place, prompt in prompts.items()]))


def read_alone(places, prompts=PROMPTS):
    return [finish(begin(places, place, prompt, place, SamplingParams()))[0] for place, prompt in prompts.items()]


def test_lengths_and_rows_are_few_and_limited(monkeypatch):
    monkeypatch.undo()
    lengths = [padded_length(n) for n in range(1, LONGEST + 1)]
    assert set(lengths) == {64, 96, 128, 192, 256, 384, 512, 768, 1024}
    assert all(n <= length <= max(64, 1.5 * n) for n, length in enumerate(lengths, 1))
    assert {length: most_together(length) for length in sorted(set(lengths))} == {
        64: 128, 96: 64, 128: 64, 192: 32, 256: 32, 384: 16, 512: 16, 768: 8, 1024: 8
    }  # fmt: skip
    assert all(length * most_together(length) <= MOST_POSITIONS for length in lengths)
    for n in (LONGEST + 1, 10**5):
        assert (padded_length(n), most_together(n)) == (n, 1)
    assert padded_length(0) == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_prompts_that_are_read_together_are_those_read_alone(name):
    made = model(**NETWORKS[name])
    together, one_by_one = TorchPlaces(made, 8), TorchPlaces(made, 8)
    for places in (together, one_by_one):  # What was in these places before must not matter, and others keep theirs.
        read_alone(places, {place: bytes(range(100, 123)) for place in range(8)})
    before = [x.clone() for x in (*together.cache.keys, *together.cache.values)]
    torch.testing.assert_close(read_together(together), read_alone(one_by_one))
    for kept, old in zip((*together.cache.keys, *together.cache.values), before):
        assert torch.equal(kept[[2, 4, 6]], old[[2, 4, 6]])
    for _ in range(4):
        turns = [places.extend(sorted(PROMPTS), 1) for places in (together, one_by_one)]
        torch.testing.assert_close(*(turn.logits() for turn in turns))
        assert turns[0].data() == turns[1].data()


def test_one_pass_has_a_row_for_each_prompt_and_rounds_sizes_up(monkeypatch):
    """Padding is a byte of the prompt: any other could be one that breaks the network, and a tile of keys with it."""
    places, passes, parts = TorchPlaces(model(), 8), [], arrivals.prefill_parts
    monkeypatch.setattr(arrivals, "prefill_parts", lambda *given: passes.append(given[2]) or parts(*given))
    read_together(places)
    read_together(places, {0: b"abcde"})
    places.reads_together = False
    read_alone(places, {0: b"abcde"})
    prompts = [*PROMPTS.values()]
    rows = [prompt + prompt[-1:] * (12 - len(prompt)) for prompt in [*prompts, *prompts[-1:] * 3]]
    assert [[bytes(row) for row in tokens.tolist()] for tokens in passes] == [rows, [b"abcdee"], [b"abcde"]]


def test_padding_stays_inside_the_context():
    made = model(context=23)
    prompts = {0: bytes(range(13)), 1: bytes(range(16)), 2: bytes(range(50, 66))}
    places = TorchPlaces(made, 3)
    torch.testing.assert_close(read_together(places, prompts), read_alone(TorchPlaces(made, 3), prompts))


@pytest.mark.parametrize("broken", [7, 0])
def test_a_prompt_that_is_not_finite_breaks_itself_alone(broken):
    """Not the others, and neither those that come to its place; no byte that nobody sent breaks anything."""
    made = model().to("cuda" if GPU else "cpu")
    made.embedding.token.weight.data[broken] = torch.inf
    prompts = {0: b"abcdefghi", 1: b"abcdefgh" + bytes([broken, 1]), 2: b"ABCDEFGHIJK"}
    places = TorchPlaces(made, 3)
    good = {place: prompt for place, prompt in prompts.items() if place != 1}
    first, bad, last = read_together(places, prompts)
    torch.testing.assert_close([first, last], read_alone(TorchPlaces(made, 3), good))
    assert not bad.isfinite().all()
    assert places.suspects == {1}
    made_first, made_bad, made_last = places.extend([0, 1, 2], 1).data()
    assert made_bad is None
    assert [made_first, made_last] == [alone(made, prompt, 1, place, SamplingParams()) for place, prompt in good.items()]
    places.leave(1)
    read_together(places, {1: b"xyz"})
    assert places.extend([1], 1).data() == [alone(made, b"xyz", 1, 1, SamplingParams())]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_kernels_go_on_after_prompts_that_were_read_together(name):
    from longstride.sampling.kernel_places import KernelPlaces

    made = model(**{"layers": 2, "width": 8, **NETWORKS[name], "context": 24}).to("cuda" if GPU else "cpu")
    places = KernelPlaces(made, 3)
    assert places.reads_together == GPU
    assert not KernelPlaces(made, 1, exact=True).reads_together
    prompts = {2: b"abcdefghi", 0: b"ABCDEFGHIJK", 1: b"0123456789"}
    read_together(places, prompts)
    found = places.extend([0, 1, 2], 3).data()
    assert found == [alone(made.to("cpu"), prompts[place], 3, place, SamplingParams()) for place in range(3)]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_gpu_reads_together_unless_it_must_be_exact():
    made = model().to("cuda")
    assert [TorchPlaces(made, 1, exact).reads_together for exact in (False, True)] == [True, False]


def test_a_cpu_reads_each_prompt_alone():
    assert not TorchPlaces(model().to("cpu"), 1).reads_together
