"""The engine: each sample is the same as alone, whatever joins and leaves beside it."""

import asyncio
import random
import threading
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstride.sampling.params import SamplingParams
from longstride.sampling.torch_places import TorchPlaces
from longstride.serving.answers import Answers, Job
from longstride.serving.engine import Engine
from longstride.serving.failures import BusyError, ModelError, StoppingError
from longstride.serving.pace import Pace
from tests.model.small import model
from tests.sampling.test_places import NETWORKS, PARAMS
from tests.serving.small import alone

NAMES = ["strided", "fixed", "rotary", "image", "audio"]


async def collect(answers):
    """The whole of each sample, as (bytes, scores, prompt_scores, finish)."""
    whole = [[b"", [], None, None] for _ in answers.answers]
    async for index, piece in answers:
        whole[index][0] += piece.data
        whole[index][1] += piece.scores
        if piece.prompt_scores is not None:
            whole[index][2] = piece.prompt_scores.listed()
        whole[index][3] = piece.finish
    return whole


def serve(made, work, **options):
    """Runs a coroutine function with an engine."""

    async def run():
        engine = Engine(made, **{"streams": 3, **options})
        engine.start()
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.stop()

    return asyncio.run(run())


class HeldPlaces(TorchPlaces):
    """Makes a byte only when it is let."""

    def __init__(self, *args):
        super().__init__(*args)
        self.let = threading.Semaphore(0)

    def extend(self, *args):
        assert self.let.acquire(timeout=60)
        return super().extend(*args)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_samples_are_the_same_as_alone(name, seed):
    made, rng = model(**NETWORKS[name]), random.Random(seed)
    is_image = name == "image"

    def job(number):
        prompt = rng.randbytes(rng.choice([0, 1, rng.randrange(23)]))
        most = 25 - len(prompt) if is_image else 40
        return Job(prompt, rng.randrange(1, most), rng.choice(PARAMS), rng.randrange(10), number)

    jobs = [job(number) for number in range(8)]

    async def work(engine):
        async def one(number):
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            answers = engine.submit([jobs[number]])
            if number % 4 == 3:  # Leaves after its first bytes.
                async for _, piece in answers:
                    if piece.finish is None:
                        answers.cancel()
                return None
            return (await collect(answers))[0]

        return await asyncio.gather(*map(one, range(len(jobs))))

    for number, found in enumerate(serve(made, work)):
        if found is not None:
            assert (found[0], found[3]) == (alone(made, jobs[number]), "length")


def test_prompts_beyond_the_context_slide_as_if_they_had_been_made():
    made = model()
    (whole,) = [b"abc" + alone(made, Job(b"abc", 90, seed=4))]

    async def work(engine):
        jobs = [Job(whole[:n], len(whole) - n, seed=4) for n in (3, 23, 24, 25, 40, 60, 71, 72)]
        return [found[0] for found in await collect(engine.submit(jobs[:1]))] + [
            (await collect(engine.submit([job])))[0][0] for job in jobs[1:]
        ]

    assert serve(made, work) == [whole[n:] for n in (3, 23, 24, 25, 40, 60, 71, 72)]


def test_samples_of_a_request_have_random_numbers_of_their_own():
    made = model()
    jobs = [Job(b"ab", 9, seed=7, index=index) for index in range(5)]
    found = serve(made, lambda engine: collect(engine.submit(jobs)))
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]
    assert len({one[0] for one in found}) == 5


class CountingPlaces(TorchPlaces):
    """Counts the prompts that are read, and those that are copied."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read, self.copied = list[bytes](), 0

    def join(self, arrivals):
        self.read += [arrival.prompt for arrival in arrivals]
        return (yield from super().join(arrivals))

    def copy(self, *args):
        self.copied += 1
        super().copy(*args)


@pytest.mark.parametrize("name", NETWORKS)
def test_samples_with_the_same_prompt_read_it_once(name):
    """And are the same as alone, beside others that run."""
    made = model(**NETWORKS[name])
    prompts = [b"abcdefghij", b"", b"abcdefghij", b"xyz", b"abcdefghij", b"xyz"]
    jobs = [Job(prompt, 14, PARAMS[1], 7, index) for index, prompt in enumerate(prompts)]
    places = CountingPlaces(made, 7)

    async def work(engine):
        beside = asyncio.create_task(collect(engine.submit([Job(b"abcdefghij", 14, seed=9)])))
        found = await collect(engine.submit(jobs))
        return found, await beside

    found, beside = serve(made, work, places=places)
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]
    assert beside[0][0] == alone(made, Job(b"abcdefghij", 14, seed=9))
    assert sorted(places.read) == [b"", b"abcdefghij", b"abcdefghij", b"xyz"]  # One is that of the other request.
    assert places.copied == 3


class JointPlaces(TorchPlaces):
    """Reads prompts together, as a GPU does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reads_together, self.read = True, list[list[bytes]]()

    def join(self, arrivals):
        self.read.append([arrival.prompt for arrival in arrivals])
        return (yield from super().join(arrivals))


@pytest.fixture
def short_lengths(monkeypatch):
    monkeypatch.setattr("longstride.sampling.arrivals.SHORTEST", 4)
    monkeypatch.setattr("longstride.sampling.arrivals.LONGEST", 16)
    monkeypatch.setattr("longstride.sampling.arrivals.MOST_POSITIONS", 64)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_wait_at_the_same_time_are_read_together(name, short_lengths):
    """Also those of samples that slide later, that are scored or that share their prompt; long ones alone."""
    made, is_image = model(**NETWORKS[name]), name == "image"
    prompts = [b"abcdefghijkl", b"", b"abcdefghij", b"xyz", b"abcdefghij", b"ABCDEFGHI", bytes(range(20)), b"z" * 9, b"x"]
    prompts += [] if is_image else [bytes(range(60))]
    jobs = [Job(prompt, 4 if is_image else 30, PARAMS[1], 7, index) for index, prompt in enumerate(prompts)]
    for index in (5, 7, 9):
        if index < len(jobs):
            jobs[index] = replace(jobs[index], likely=2, scores_prompt=True)
    places = JointPlaces(made, len(jobs))
    found = serve(made, lambda engine: collect(engine.submit(jobs)), places=places)
    each = [serve(made, lambda engine, job=job: collect(engine.submit([job])))[0] for job in jobs]
    assert [one[0] for one in found] == [one[0] for one in each]
    for one, other in zip(found, each):
        for scores, others in ((one[1], other[1]), (one[2] or [], other[2] or [])):
            pair = ([score.logprob for score in both] for both in (scores, others))
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)
    read = [sorted(prompts) for prompts in places.read]
    assert sorted([b"abcdefghijkl", b"abcdefghij", b"ABCDEFGHI", b"z" * 9]) in read  # The fifth gets a copy of the third's.
    assert [b"x", b"xyz"] in read
    assert [bytes(range(20))] in read
    assert all(len(read) == 1 for read in places.read if len(read[0]) > 16)
    assert all(len(read) * 12 <= 64 for read in places.read if len(read[0]) > 8)


def test_as_many_prompts_are_read_together_as_a_pass_has_room_for(short_lengths):
    made = model()
    places, jobs = JointPlaces(made, 12), [Job(b"abcdefgh%d" % number, 3) for number in range(10, 22)]
    found = serve(made, lambda engine: collect(engine.submit(jobs)), places=places)
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]
    assert [len(read) for read in places.read] == [4, 4, 4]  # Of 12 positions.


def take_turns(engine):
    while engine._new or not all(stream.done for stream in engine._held):
        engine._go_on()


def test_a_place_that_was_left_is_free_when_the_prompts_beside_it_are_read(monkeypatch):
    """Until then the pass writes to it."""
    monkeypatch.setattr("longstride.serving.pace.READING_SECONDS", 0)  # A part at a time.
    made, jobs = model(), [Job(b"abcdefgh", 6), Job(b"ijklmnop", 6, seed=1), Job(b"qrst", 9, seed=2)]
    places = JointPlaces(made, 2)

    async def work():
        engine = Engine(made, places=places)  # Not started: its turns are taken here.
        answers = [engine.submit([job]) for job in jobs]
        found = [asyncio.create_task(collect(answer)) for answer in answers]
        await asyncio.sleep(0)
        engine._go_on()
        assert places.read == [[b"abcdefgh", b"ijklmnop"]]
        answers[0].cancel()
        engine._go_on()
        assert [stream.job for stream in engine._held] == jobs[:2]
        assert engine.counts.samples["left"] == 1
        take_turns(engine)
        assert places.read == [[b"abcdefgh", b"ijklmnop"], [b"qrst"]]
        return await asyncio.wait_for(asyncio.gather(*found[1:]), 60)

    assert [one[0][0] for one in asyncio.run(work())] == [alone(made, job) for job in jobs[1:]]


def test_a_place_that_was_left_is_free_while_a_sample_that_was_read_with_it_goes_on(monkeypatch):
    monkeypatch.setattr("longstride.serving.pace.READING_SECONDS", 0)
    made = model()

    async def work():
        engine = Engine(made, places=JointPlaces(made, 2))  # Not started: its turns are taken here.
        engine.submit([Job(b"abcdefgh", 50)])
        scored = engine.submit([Job(b"ijklmnop", 50, likely=0, scores_prompt=True)])
        while not engine._running:  # The other one is scored after this.
            engine._go_on()
        scored.cancel()
        engine._go_on()
        assert [stream.answers is scored for stream in engine._held] == [False]

    asyncio.run(work())


def test_a_pass_that_nobody_waits_for_ends_at_once(monkeypatch):
    monkeypatch.setattr("longstride.serving.pace.READING_SECONDS", 0)
    made, places = model(), JointPlaces(model(), 2)

    async def work():
        engine = Engine(made, places=places)
        answers = [engine.submit([Job(prompt, 6)]) for prompt in (b"abcdefgh", b"ijklmnop")]
        engine._go_on()
        for answer in answers:
            answer.cancel()
        found = asyncio.create_task(collect(engine.submit([Job(b"q", 9)])))
        await asyncio.sleep(0)
        engine._drop_left()
        assert (engine._held, len(engine._free)) == ([], 2)
        take_turns(engine)
        return await asyncio.wait_for(found, 60)

    assert asyncio.run(work())[0][0] == alone(made, Job(b"q", 9))


def test_a_prompt_that_is_not_finite_fails_alone_among_those_read_with_it():
    made = model()
    made.embedding.token.weight.data[7] = torch.inf
    jobs = [Job(b"abcdefgh", 6), Job(b"abc\x07efgh", 6), Job(b"a\x07b", 0, likely=0, scores_prompt=True), Job(b"ijkl", 6)]
    places = JointPlaces(made, 4)

    async def work(engine):
        answers = [engine.submit([job]) for job in jobs]
        return await asyncio.gather(*map(collect, answers), return_exceptions=True)

    found = serve(made, work, places=places)
    assert len(max(places.read, key=len)) > 1
    for job, one in zip(jobs, found):
        if 7 in job.prompt:
            assert isinstance(one, ModelError)
        else:
            assert one[0][0] == alone(made, job)


def test_samples_with_the_same_prompt_have_the_same_scores_of_it():
    made = model()
    for prompt in (bytes(range(20)), bytes(range(60))):
        for length in (0, 9):
            jobs = [Job(prompt, length, seed=3, index=index, likely=2, scores_prompt=True) for index in range(5)]
            places = CountingPlaces(made, 3)
            found = serve(made, lambda engine, jobs=jobs: collect(engine.submit(jobs)), places=places)
            each = [serve(made, lambda engine, job=job: collect(engine.submit([job])))[0] for job in jobs]
            assert found == each
            assert len(each[0][2]) == len(prompt)
            # Three samples have places at a time, and then two, of which the last may come when the other has read it.
            # Later windows, of what was made, are read by each.
            firsts = [window for window in places.read if window == prompt[:24]]
            assert len(firsts) == 2 or (length and len(firsts) == 3)


def test_a_prompt_is_shared_until_all_that_wait_for_it_have_it():
    """Samples that come to a place while their prompt is being copied, and a request that leaves meanwhile."""
    made = model()

    async def work(engine):
        jobs = [Job(b"abcdefgh", 6, seed=1, index=index) for index in range(40)]
        left = engine.submit([Job(b"abcdefgh", 300, index=index) for index in range(3)])
        answers = asyncio.create_task(collect(engine.submit(jobs)))
        while engine.counts.running < 3:
            await asyncio.sleep(0)
        left.cancel()
        return await answers, jobs

    found, jobs = serve(made, work)
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]


def test_a_place_that_was_left_is_not_filled_by_those_who_read_the_same_prompt():
    """The thread may see that a request leaves when only some of its samples are marked."""
    made, other = model(), Job(b"z", 20, seed=5)
    places = CountingPlaces(made, 2)

    async def work():
        engine = Engine(made, places=places)  # Not started: its turns are taken here.
        left = engine.submit([Job(b"abcdefghijkl", 6, index=index) for index in range(2)])
        engine._admit()
        left.answers[1].ended = True
        engine._drop_left()
        found = asyncio.create_task(collect(engine.submit([other])))
        await asyncio.sleep(0)
        while engine._new or not all(stream.done for stream in engine._held):
            engine._go_on()
        return await asyncio.wait_for(found, 60)

    assert asyncio.run(work())[0][0] == alone(made, other)
    assert places.copied == 0


def test_nothing_is_read_if_nothing_is_asked_for():
    made = model()
    places = CountingPlaces(made, 1)

    async def work(engine):
        held = engine.submit([Job(b"a", 10**6)])  # Others wait for no place.
        found = await collect(engine.submit([Job(b"abc", 0, likely=likely) for likely in (None, 3)]))
        held.cancel()
        return found

    assert serve(made, work, places=places) == [[b"", [], None, "length"]] * 2
    assert b"abc" not in places.read


@pytest.mark.parametrize(("samples", "is_streamed", "pieces"), [(1, True, 12), (3, True, 5), (3, False, 1)])
def test_pieces_come_less_often_the_more_samples_there_are(monkeypatch, samples, is_streamed, pieces):
    """The first and the last at once; those of an answer that is sent whole need not come before."""
    made, delivered, seconds = model(), list[bytes](), 0.0
    monkeypatch.setattr("longstride.serving.hand_over.PIECE_SECONDS", 1.0)
    monkeypatch.setattr("longstride.serving.hand_over.WHOLE_SECONDS", 100.0)
    monkeypatch.setattr("longstride.serving.hand_over.time", SimpleNamespace(perf_counter=lambda: seconds))
    monkeypatch.setattr("longstride.sampling.marks.time", SimpleNamespace(perf_counter=lambda: 0.0))  # All begin at once.
    deliver = Answers.deliver
    monkeypatch.setattr(Answers, "deliver", lambda self, *given: delivered.append(given[1].data) or deliver(self, *given))

    async def work():
        nonlocal seconds
        engine = Engine(made, places=TorchPlaces(made, samples))  # Not started: its turns are taken here.
        answers = engine.submit([Job(b"", 12, index=index) for index in range(samples)], is_streamed)
        while not all(answer.ended for answer in answers.answers):
            seconds += 1
            engine._go_on()
            await asyncio.sleep(0)

    asyncio.run(work())
    assert len(delivered) == samples * pieces
    assert sum(map(len, delivered)) == samples * 12


def test_stop_sequences_end_a_sample():
    made = model()
    text = alone(made, Job(b"", 20, seed=2))
    cases = {text[5:7]: text[:5], text[9:10] + text[3:4]: text, text[:1]: b"", text[19:]: text[: text.find(text[19:])]}

    async def work(engine):
        return [(await collect(engine.submit([Job(b"", 20, seed=2, stop=(stop,))])))[0] for stop in cases]

    for (stop, expected), found in zip(cases.items(), serve(made, work)):
        cut = text.find(stop)
        assert (found[0], found[3]) == ((text[:cut], "stop") if cut >= 0 else (text, "length"))
        assert found[0] == expected or cut >= 0


def test_scores():
    """Of the prompt and of what was made, as the network in one pass has them."""
    made = model()

    async def work(engine):
        jobs = [Job(b"abcdef", 10, seed=1, likely=2, scores_prompt=True), Job(b"x" * 24, 0, likely=0, scores_prompt=True)]
        return await collect(engine.submit(jobs))

    first, second = serve(made, work)
    for prompt, (data, scores, prompt_scores, finish) in ((b"abcdef", first), (b"x" * 24, second)):
        with torch.no_grad():
            nats = made.nats(torch.tensor([list(prompt + data)]))[0]
        torch.testing.assert_close(torch.tensor([-one.logprob for one in prompt_scores + scores]), nats)
        assert finish == "length"
    assert [len(one.likely) for one in first[1]] == [2] * 10
    assert second[0] == b""


@pytest.mark.parametrize("others", [0, 2])
def test_scores_of_a_prompt_beyond_the_context_are_those_of_its_windows(others, monkeypatch):
    """In one piece, whatever is handed over to others between the windows."""
    monkeypatch.setattr("longstride.serving.hand_over.HAND_OVER_SECONDS", 0)
    monkeypatch.setattr("longstride.serving.pace.READING_SECONDS", 0)
    made = model()
    prompt = bytes(range(50))

    async def work(engine):
        beside = [asyncio.create_task(collect(engine.submit([Job(b"", 60)]))) for _ in range(others)]
        pieces = [piece async for _, piece in engine.submit([Job(prompt, 0, likely=0, scores_prompt=True)])]
        await asyncio.gather(*beside)
        return pieces

    (piece,) = serve(made, work)
    scores = piece.prompt_scores.listed()
    expected = []
    with torch.no_grad():
        for start, skipped in ((0, 0), (12, 12), (24, 12), (36, 12)):
            nats = made.nats(torch.tensor([list(prompt[start : start + 24])]))[0]
            expected += nats[skipped:].tolist()
    torch.testing.assert_close([-one.logprob for one in scores], expected, rtol=1e-5, atol=1e-5)


def test_a_full_queue_refuses_and_a_sample_that_leaves_makes_room():
    made = model()
    places = HeldPlaces(made, 1)

    async def work(engine):
        first = engine.submit([Job(b"a", 3)])
        while engine.counts.running < 1:
            await asyncio.sleep(0.001)
        second = engine.submit([Job(b"b", 3), Job(b"c", 3)])
        with pytest.raises(BusyError) as refused:
            engine.submit([Job(b"d", 3)])
        assert 1 <= refused.value.retry_after <= 60
        assert engine.counts.refused == 1
        second.cancel()
        while engine.counts.waiting:
            places.let.release()
            await asyncio.sleep(0.001)
        third = engine.submit([Job(b"e", 3)])
        first.cancel()
        for _ in range(10):
            places.let.release()
        return (await collect(third))[0]

    found = serve(made, work, places=places, queue=2)
    assert found[0] == alone(made, Job(b"e", 3))


def test_a_burst_gets_all_places_and_the_whole_queue():
    made = model()

    async def work(engine):
        for _ in range(3):
            found = await asyncio.gather(*(collect(engine.submit([Job(b"a", 3)])) for _ in range(4)))
            assert [one[0][0] for one in found] == [alone(made, Job(b"a", 3))] * 4
        answers = [engine.submit([Job(b"a", 300)]) for _ in range(4)]
        with pytest.raises(BusyError):
            engine.submit([Job(b"a", 3)])
        for one in answers:
            one.cancel()

    serve(made, work, streams=2, queue=2)


def test_scores_of_all_samples_together_have_a_limit(monkeypatch):
    made = model()
    monkeypatch.setattr("longstride.serving.engine.MOST_SCORED", 50)
    places = HeldPlaces(made, 1)
    scored, plain = Job(b"abcd", 6, likely=1, scores_prompt=True), Job(b"abcd", 6)
    assert (scored.numbers, plain.numbers) == (30, 0)

    async def work(engine):
        first = engine.submit([scored])
        with pytest.raises(BusyError):
            engine.submit([scored])
        second = engine.submit([plain])
        for _ in range(20):
            places.let.release()
        await collect(first)
        await collect(second)
        return (await collect(engine.submit([scored])))[0][0]

    assert serve(made, work, places=places) == alone(made, plain)


def test_a_sample_that_leaves_frees_its_place():
    made = model()
    places = HeldPlaces(made, 1)

    async def work(engine):
        first, second = engine.submit([Job(b"a", 10**6)]), engine.submit([Job(b"b", 2)])
        places.let.release()
        async for _, _ in first:
            break  # The reader goes away, and does not even cancel.
        await asyncio.sleep(0)
        first.cancel()
        for _ in range(5):
            places.let.release()
        found = await collect(second)
        return found[0][0], dict(engine.counts.samples)

    found, counts = serve(made, work, places=places)
    assert found == alone(made, Job(b"b", 2))
    assert counts == {"stop": 0, "length": 1, "left": 1, "failed": 0}


def test_stops_when_all_is_done():
    made = model()

    async def run():
        engine = Engine(made, streams=1)
        engine.start()
        answers = [engine.submit([Job(b"", 30, seed=seed)]) for seed in range(3)]
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(StoppingError):
            engine.submit([Job(b"", 1)])
        with pytest.raises(StoppingError):
            await engine.run(lambda: 1)
        found = [(await collect(answer))[0][0] for answer in answers]
        await stopping
        assert not engine.is_alive
        return found

    assert asyncio.run(run()) == [alone(made, Job(b"", 30, seed=seed)) for seed in range(3)]


def test_a_short_request_does_not_wait_for_a_long_prompt():
    """Of which each window is a part of its own, whether or not it makes bytes."""
    made = model()

    async def work(engine):
        long = [Job(bytes(range(250)) * 200, 0, likely=0, scores_prompt=True) for _ in range(2)]
        waiting = asyncio.create_task(collect(engine.submit(long)))
        while engine.counts.running < 2:
            await asyncio.sleep(0)
        found = (await collect(engine.submit([Job(b"a", 5)])))[0][0]
        called = await engine.run(lambda: 1)
        assert not waiting.done()
        waiting.cancel()
        while engine.counts.running:
            await asyncio.sleep(0)
        return found, called, engine.counts.samples["left"]

    assert serve(made, work) == (alone(made, Job(b"a", 5)), 1, 2)


class Moment(float):
    """A mark of a stub's clock."""

    def seconds_since(self, earlier):
        return self - earlier


class TimedPlaces(TorchPlaces):
    """A part of a prompt takes five seconds of the device, a step one. A GPU spends them after the calls have returned: no
    clock of the host shows them."""

    def __init__(self, made, count, on_gpu):
        super().__init__(made, count)
        self.runs_ahead = self.is_async = on_gpu
        self.seconds, self.seen = 0.0, list[str]()

    def mark(self):
        return Moment(self.seconds)

    def join(self, arrivals):
        for size in super().join(arrivals):
            self.seconds += 5
            self.seen.append("part")
            yield size
        return [None] * len(arrivals)

    def extend(self, *args):
        self.seconds += 1
        self.seen.append("step")
        return super().extend(*args)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("waiting", "share"), [(1, 1), (3, 3), (8, 4)])
def test_prompts_take_as_much_time_as_bytes(monkeypatch, waiting, share, on_gpu):
    """For each stream that waits."""
    made = model(layers=6, context=64)
    places = TimedPlaces(made, 1 + waiting, on_gpu)
    host = SimpleNamespace(perf_counter=lambda: 0.0 if on_gpu else places.seconds)
    monkeypatch.setattr("longstride.sampling.marks.time", host)
    jobs = [Job(b"", 60), *(Job(b"a%d" % number, 3) for number in range(waiting))]
    found = serve(made, lambda engine: collect(engine.submit(jobs)), places=places)
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]
    parts = [at for at, name in enumerate(places.seen) if name == "part"]
    assert len(parts) == waiting * made.config.layers > 1
    # Nothing runs before the first part, and less waits after the first prompt. A GPU's first times are not known yet.
    between = [later - earlier - 1 for earlier, later in pairwise(parts[1 + 2 * on_gpu : made.config.layers + 1])]
    assert all(5 // share <= steps <= 5 // share + 2 for steps in between), between


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_part_at_a_time_is_read_before_any_is_timed(monkeypatch, on_gpu):
    """Without a running stream, too: one that comes would have to wait for all that was launched."""
    monkeypatch.setattr("longstride.sampling.marks.time", SimpleNamespace(perf_counter=lambda: 0.0))
    made = model()
    places, ends = TimedPlaces(made, 4, on_gpu), list[float]()
    if not on_gpu:
        monkeypatch.setattr("longstride.sampling.marks.time", SimpleNamespace(perf_counter=lambda: places.seconds))
    settle = Pace.settle
    monkeypatch.setattr(Pace, "settle", lambda self, reading: ends.append(places.seconds) or settle(self, reading))
    jobs = [Job(b"a%d" % number, 0, likely=0, scores_prompt=True) for number in range(4)]
    serve(made, lambda engine: collect(engine.submit(jobs)), places=places)
    assert all(later - earlier <= 5 for earlier, later in pairwise([0.0, *ends]))
    assert places.seen.count("part") == 4 * made.config.layers


def test_samples_go_on_between_two_calls(monkeypatch):
    """Which take no time here."""
    monkeypatch.setattr("longstride.serving.engine.time", SimpleNamespace(perf_counter=lambda: 0.0))
    made = model()

    async def work(engine):
        all_are_here, counts = threading.Event(), list[int]()
        works = [all_are_here.wait, *[lambda: counts.append(engine.counts.bytes)] * 5]
        calls = [asyncio.create_task(engine.run(work)) for work in works]
        await asyncio.sleep(0)
        answers = engine.submit([Job(b"", 10)])
        all_are_here.set()
        await asyncio.gather(collect(answers), *calls)
        return counts

    assert serve(made, work) == [1, 2, 3, 4, 5]


def test_calls_take_no_more_time_than_bytes(monkeypatch):
    """A call takes as long as four steps here."""
    made = model()
    places = TimedPlaces(made, 1, on_gpu=False)
    monkeypatch.setattr("longstride.serving.engine.time", SimpleNamespace(perf_counter=lambda: places.seconds))

    def call():
        places.seconds += 4
        places.seen.append("call")

    async def work(engine):
        answers = engine.submit([Job(b"", 20)])
        await asyncio.gather(collect(answers), *(engine.run(call) for _ in range(4)))

    serve(made, work, places=places)
    calls = [at for at, name in enumerate(places.seen) if name == "call"]
    assert [later - earlier - 1 for earlier, later in pairwise(calls)][1:] == [4, 4]


def test_a_short_prompt_is_read_beside_long_ones():
    made, seen = model(), list[int]()

    class Seen(TorchPlaces):
        def join(self, arrivals):
            for size in super().join(arrivals):
                seen.append(len(arrivals[0].prompt))
                yield size
            return [None]

    jobs = [Job(prompt, 2) for prompt in (b"abcdefgh", b"ijklmnop", b"x")]
    found = serve(made, lambda engine: collect(engine.submit(jobs)), places=Seen(made, 3))
    assert [one[0] for one in found] == [alone(made, job) for job in jobs]
    assert seen.index(1) <= 1
    assert seen[: 2 * made.config.layers].count(1) == made.config.layers


def test_calls_run_in_the_thread_of_the_model_between_bytes():
    made = model()

    async def work(engine):
        answers = asyncio.create_task(collect(engine.submit([Job(b"", 20)])))
        threads = [await engine.run(threading.current_thread) for _ in range(3)]
        with pytest.raises(ZeroDivisionError):
            await engine.run(lambda: 1 // 0)
        found = await answers
        assert {thread.name for thread in threads} == {"longstride engine"}
        return found[0][0]

    assert serve(made, work) == alone(made, Job(b"", 20))


def test_a_failure_is_that_of_its_samples_alone(caplog):
    made = model()
    made.embedding.token.weight.data[7] = torch.inf

    class Breaking(TorchPlaces):
        def join(self, arrivals):
            if arrivals[0].prompt == b"bang":
                raise RuntimeError("secret path /home")
            return super().join(arrivals)

    async def work(engine):
        good = asyncio.create_task(collect(engine.submit([Job(b"a", 10, SamplingParams(top_k=1))])))
        with pytest.raises(ModelError, match="not finite"):
            await collect(engine.submit([Job(b"\x07", 5)]))
        found = (await good)[0][0]
        with pytest.raises(ModelError) as failed:
            await collect(engine.submit([Job(b"bang", 5)]))
        assert "secret" not in str(failed.value)
        assert (await collect(engine.submit([Job(b"a", 10, SamplingParams(top_k=1))])))[0][0] == found
        return engine.counts.samples["failed"]

    assert serve(made, work, places=Breaking(made, 2)) == 2
    assert "secret path" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_go_on_keeps_nobody_waiting(caplog):
    made = model()

    leaving, let = threading.Event(), threading.Event()

    class Lost(TorchPlaces):
        def leave(self, place):
            leaving.set()
            assert let.wait(60)
            raise RuntimeError("the device is gone")

    async def work(engine):
        answers = [engine.submit([Job(b"a", 2)]), engine.submit([Job(b"b", 10**6)]), engine.submit([Job(b"c", 5)])]
        while not leaving.is_set():
            await asyncio.sleep(0)
        call = asyncio.create_task(engine.run(lambda: 1))
        await asyncio.sleep(0)
        let.set()
        found = await asyncio.gather(*map(collect, answers), return_exceptions=True)
        assert found[0][0][3] == "length"
        assert all(isinstance(one, ModelError) for one in found[1:])
        with pytest.raises(ModelError):
            await call
        with pytest.raises(StoppingError):
            engine.submit([Job(b"d", 2)])
        while engine.is_alive:
            await asyncio.sleep(0.001)

    serve(made, work, places=Lost(made, 2))
    assert "the device is gone" in caplog.text
