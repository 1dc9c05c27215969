"""Streams that join and leave a batch: each is the same as alone, by `generate`."""

import importlib.util
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.sampling import generate
from longstride.sampling.arrivals import Arrival
from longstride.sampling.params import SamplingParams
from longstride.sampling.places import open_places, place_count
from longstride.sampling.position import can_halve, can_pack
from longstride.sampling.sampler import random_state
from longstride.sampling.scores import score
from longstride.sampling.torch_places import MOST_NETWORKS, TorchPlaces
from tests.model.small import model

GPU = torch.cuda.is_available()
MODERN = {"norm": "rms", "qk_norm": True, "init": "modern"}
NETWORKS = {
    "strided": {},
    "fixed": {"pattern": "distinct(merged(fixed(6, 2)))"},
    "blind": {"pattern": "interleave(fixed(6, 1))"},
    "rotary": {"pattern": "local(5) + distinct(merged(fixed(4, 1)))", "embedding": "rotary", "last_bytes": 3, **MODERN},
    "image": {"pattern": "column(6) + 2*local(6)", "embedding": "image(2, 4, 3)"},
    "audio": {"pattern": "interleave(strided(6))", "embedding": "matrix(6)", "qk_ratio": 0.5},
    "half": {"precision": "bfloat16"},
    "dense": {"pattern": "dense()"},
}
PARAMS = [SamplingParams(), SamplingParams(0.7, None, 0.9), SamplingParams(top_k=1), SamplingParams(1.3, 20)]


def alone(made, prompt, length, seed, params):
    pieces = generate(
        made, [prompt], length, seed=seed, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    return b"".join(piece[0] for piece in pieces)


def begin(places, place, prompt, seed, params):
    return places.join([arrival(place, prompt, seed, params)])


def arrival(place, prompt, seed, params=PARAMS[0]):
    return Arrival(place, prompt, int(random_state(seed, torch.tensor([0]))[0]), params)


def finish(joining):
    while True:
        try:
            next(joining)
        except StopIteration as end:
            return end.value


def play(places, jobs, rng, context, most_steps=1):
    """Lets streams join where and when chance has it; returns their bytes."""
    made, waiting, joining, active = [b""] * len(jobs), list(range(len(jobs))), {}, {}
    while waiting or joining or active:
        free = [place for place in range(places.count) if place not in joining and place not in active]
        while waiting and free and rng.random() < 0.6:
            place = free.pop(rng.randrange(len(free)))
            prompt, _, seed, params = jobs[waiting[0]]
            joining[place] = waiting.pop(0), begin(places, place, prompt, seed, params)
        for place, (job, parts) in list(joining.items()):
            if rng.random() < 0.7 and next(parts, "end") == "end":
                active[place] = job
                del joining[place]
        chosen = sorted(place for place in active if rng.random() < 0.9)  # Some wait.
        if not chosen:
            continue
        room = min(context - len(jobs[active[place]][0]) - len(made[active[place]]) for place in chosen)
        for place, new in zip(chosen, places.extend(chosen, min(room, most_steps)).data()):
            job = active[place]
            made[job] = (made[job] + new)[: jobs[job][1]]
            if len(made[job]) == jobs[job][1]:
                places.leave(place)
                del active[place]
    return made


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 9))
def test_a_stream_is_the_same_as_alone(name, seed, count):
    made, rng = model(**NETWORKS[name]), random.Random(seed)
    jobs = []
    for number in range(2 * count):
        prompt = rng.randbytes(rng.choice([0, 1, 2, rng.randrange(23)]))
        jobs.append((prompt, rng.randrange(1, 25 - len(prompt)), number, rng.choice(PARAMS)))
    together = play(TorchPlaces(made, count), jobs, rng, 24)
    assert together == [alone(made, *job) for job in jobs]


def test_windows_of_tables_are_shared_and_limited(monkeypatch):
    monkeypatch.setattr("longstride.sampling.torch_places.WINDOW", 8)
    monkeypatch.setattr("longstride.sampling.torch_places.WINDOW_BYTES", 1)
    made = model(**NETWORKS["fixed"])
    jobs = [(bytes(number), 24 - number, number, SamplingParams()) for number in (0, 5, 17)]
    places = TorchPlaces(made, 3)
    assert play(places, jobs, random.Random(0), 24) == [alone(made, *job) for job in jobs]
    assert len(places.windows) == 1


@pytest.mark.parametrize("products", ["plain", "packed", "half"])
def test_bits_do_not_depend_on_the_others(products, monkeypatch):
    """Not only the bytes: the logits."""
    if products != "plain":  # As oneDNN and FBGEMM do it for larger networks.
        monkeypatch.setattr("longstride.sampling.position.PACKED_NETWORK", 0)
        monkeypatch.setattr("longstride.sampling.position.PACKED_MATRIX", 0)
    made = model(width=48, heads=4, **{**NETWORKS["rotary"], "context": 24})
    cpu, least_rows = torch.device("cpu"), None
    if products == "packed" and can_pack(cpu):
        least_rows = 2
    if products == "half":
        if not can_halve(cpu):
            pytest.skip("needs FBGEMM")
        least_rows = 1
        for parameter in made.parameters():
            parameter.data = parameter.data.bfloat16().float()
    prompt, found = b"abcdefgh", []
    for others in (0, 1, 6, 30):
        places = TorchPlaces(made, 32)
        assert places.products.least_rows == least_rows
        for place in range(others):
            finish(begin(places, place, bytes(range(place % 20)), place, SamplingParams()))
        finish(begin(places, others, prompt, 3, SamplingParams()))
        rows = [places.extend(range(others + 1), 1).logits()[others] for _ in range(3)]
        found.append(torch.stack(rows))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_any_number_of_streams_shares_the_weights_and_few_buffers():
    made = model()
    places = TorchPlaces(made, 20)
    for place in range(20):
        finish(begin(places, place, b"ab", place, SamplingParams()))
    for count in (20, 1, 20, *range(1, 20)):
        places.extend(range(count), 1)
    assert len(places.networks) == MOST_NETWORKS
    outputs = {id(network.output) for network in places.networks.values()}
    assert len(outputs) == 1


def test_logits_that_are_not_finite_break_their_stream_alone():
    made = model()
    made.embedding.token.weight.data[7] = torch.inf
    places = TorchPlaces(made, 3)
    for place, prompt in enumerate([b"a", b"\x07", b""]):
        finish(begin(places, place, prompt, place, SamplingParams(top_k=1)))
    first, broken, last = places.extend([0, 1, 2], 1).data()
    assert broken is None
    assert first == alone(made, b"a", 1, 0, SamplingParams(top_k=1))
    assert last == alone(made, b"", 1, 2, SamplingParams(top_k=1))


def test_a_broken_stream_leaves_nothing_to_the_next():
    made = model()
    made.embedding.token.weight.data[7] = torch.inf
    places = TorchPlaces(made, 1)
    finish(begin(places, 0, b"ab\x07cd", 0, SamplingParams()))
    assert places.extend([0], 1).data() == [None]
    places.leave(0)
    finish(begin(places, 0, b"", 0, SamplingParams()))
    assert b"".join(places.extend([0], 1).data()[0] for _ in range(9)) == alone(made, b"", 9, 0, SamplingParams())


def test_hidden_states_score_the_prompt():
    made = model()
    places = TorchPlaces(made, 1)
    prompt = bytes(range(24))
    (hidden,) = finish(begin(places, 0, prompt, 0, SamplingParams()))
    scores = score(places.logits(hidden), prompt, 3).listed()
    with torch.no_grad():
        nats = made.nats(torch.tensor([list(prompt)]))[0]
    torch.testing.assert_close(torch.tensor([-one.logprob for one in scores]), nats)
    assert all(len(one.likely) == 3 and one.likely[0][1] >= one.logprob for one in scores)
    assert finish(begin(places, 0, b"", 0, SamplingParams())) == [None]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_copy_of_a_prompt_has_the_bits_of_the_prompt(name):
    """Whatever was in its place before."""
    made = model(**NETWORKS[name])
    for length in (0, 1, 13, 23):
        prompt, places = bytes(range(length)), TorchPlaces(made, 4)
        for place in (1, 3):
            finish(begin(places, place, bytes(range(100, 123)), place, SamplingParams()))
            places.extend([place], 1)
            places.leave(place)
        for place in (0, 1):
            finish(begin(places, place, prompt, 5, SamplingParams()))
        places.copy(0, 3, places.streams[0].state, SamplingParams())
        turns = [places.extend([0, 1, 3], 1) for _ in range(min(3, 24 - length))]
        for turn in turns:
            logits = turn.logits()
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])
            assert len(set(turn.data())) == 1


def test_a_copy_of_a_broken_prompt_leaves_nothing_to_the_next():
    made = model()
    made.embedding.token.weight.data[7] = torch.inf
    places = TorchPlaces(made, 2)
    finish(begin(places, 0, b"ab\x07cd", 0, SamplingParams()))
    places.copy(0, 1, 0, SamplingParams())
    assert places.extend([0, 1], 1).data() == [None, None]
    places.leave(1)
    finish(begin(places, 1, b"", 0, SamplingParams()))
    assert b"".join(places.extend([1], 1).data()[0] for _ in range(9)) == alone(made, b"", 9, 0, SamplingParams())


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
def test_a_copy_by_kernels():
    from longstride.sampling.kernel_places import KernelPlaces

    made = model(layers=2, width=8, context=24).to("cuda" if GPU else "cpu")
    prompt, places = b"abcdefg", KernelPlaces(made, 2, exact=True)
    finish(begin(places, 0, prompt, 3, SamplingParams()))
    places.copy(0, 1, int(random_state(4, torch.tensor([0]))[0]), PARAMS[1])
    found = places.extend([0, 1], 4).data()
    assert found == [alone(made.to("cpu"), prompt, 4, 3, SamplingParams()), alone(made, prompt, 4, 4, PARAMS[1])]


def test_who_serves():
    assert isinstance(open_places(model().to("cpu"), 2), TorchPlaces)
    assert open_places(model().to("cpu")).count == 64


def test_places_take_a_share_of_the_memory(monkeypatch):
    gigabyte, network = 10**9, model().config
    monkeypatch.setattr("longstride.sampling.places.cache_bytes", lambda config: 10**8)

    def count(device, memory):
        monkeypatch.setattr("longstride.sampling.places.memory_bytes", lambda device: memory)
        return place_count(network, torch.device(device))

    assert [count("cpu", memory) for memory in (None, 100 * gigabyte, 8 * gigabyte)] == [10, 10, 10]
    assert [count("cpu", memory) for memory in (2 * gigabyte, 10**6)] == [5, 1]
    assert [count("cuda", memory) for memory in (140 * gigabyte, 8 * gigabyte)] == [64, 20]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_kernels(name, exact):
    """On a GPU with many more steps than in the interpreter."""
    from longstride.sampling.kernel_places import KernelPlaces
    from longstride.sampling.resident import ResidentStreams

    device = "cuda" if GPU else "cpu"
    made = model(**{"layers": 2, "width": 8, **NETWORKS[name], "context": 24}).to(device)
    rng = random.Random(name)
    jobs = []
    for number in range(12 if GPU else 4):
        prompt = rng.randbytes(rng.choice([0, 3, 10]))
        jobs.append((prompt, rng.randrange(1, 25 - len(prompt) if GPU else 6), number, rng.choice(PARAMS)))
    places, alone_turns = KernelPlaces(made, 3 if GPU else 2, exact), []
    if not exact:
        places.alone = ResidentStreams(made, 1, 24, shared=places.batch)
        extend = places.alone.extend
        places.alone.extend = lambda *args: alone_turns.append(1) or extend(*args)
    assert play(places, jobs, rng, 24, most_steps=3) == [alone(made.to("cpu"), *job) for job in jobs]
    assert bool(alone_turns) != exact
