"""The engine: one thread runs the model for all requests. A stream joins and leaves the running batch between bytes.

    engine = Engine(model, streams=64, queue=256)
    engine.start()
    async for index, piece in engine.submit([Job(b"The ", 100, seed=1)]): ...
    await engine.run(lambda: ...)                               # anything else that uses the model
    await engine.stop()                                         # finishes what is under way

The event loop never waits for the model: the thread hands pieces over as they come.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from longstride.model import SparseTransformer
from longstride.sampling.marks import Mark
from longstride.sampling.places import Places, Turn, open_places
from longstride.sampling.scores import score
from longstride.serving.answers import Answers, Job, Piece
from longstride.serving.failures import FAILED, NOT_FINITE, BusyError, ModelError, StoppingError
from longstride.serving.hand_over import HandOver
from longstride.serving.joining import Joining
from longstride.serving.pace import Pace, Reading
from longstride.serving.stream import Stream

Result = TypeVar("Result")
LOG = logging.getLogger("longstride")
ABANDON_SECONDS = 10.0
"""The longest wait for a turn that nobody wants."""
MOST_SCORED = 2**24
"""The most bytes and logprobs that all samples together may have to be scored for; each takes up to 100 bytes of memory."""


@dataclass
class Counts:
    """What the engine has done so far, and does now."""

    waiting: int = 0
    """Samples in the queue."""
    running: int = 0
    """Samples with a place."""
    prompt_bytes: int = 0
    bytes: int = 0
    """Bytes that were made."""
    turns: int = 0
    steps: int = 0
    """Steps of the model, each of which makes a byte of every running sample."""
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "left", "failed"), 0))
    """Samples by the way they ended."""
    refused: int = 0
    """Samples that found the queue full."""


class _Launched(NamedTuple):
    """A turn that a GPU may still be computing."""

    turn: Turn
    streams: list[Stream]
    steps: int
    reading: Reading | None
    """Of prompts, just before it."""
    begin: Mark
    end: Mark


class Engine:
    """Runs a model in a thread of its own."""

    def __init__(
        self, model: SparseTransformer, streams: int | None = None, queue: int = 256, exact: bool = False,
        places: Places | None = None,
    ) -> None:  # fmt: skip
        """streams: samples made at once; None: `place_count`. queue: the most that wait. exact: see
        `open_places`."""
        self.model, self.config = model, model.config
        self.places = places or open_places(model, streams, exact)
        self.queue, self.counts = queue, Counts()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._new: deque[Stream] = deque()
        """Samples that wait for a place."""
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stopping = self._abandoned = False
        self._free = list(range(self.places.count))[::-1]
        self._held: list[Stream] = []
        """Streams with a place."""
        self._turn: _Launched | None = None
        """What a GPU works on."""
        self._pace = Pace(self.places)
        self._step_seconds = 0.0
        self._owed_to_calls = 0.0
        """Seconds for which turns are taken before the next call, as the last took longer than a turn."""
        self._parts = 0
        """Of prompts that were read."""
        self._hand_over = HandOver()
        self._thread = threading.Thread(target=self._work, name="longstride engine", daemon=True)

    # In the event loop.

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Finishes what is under way, and ends the thread."""
        self._stopping = True
        self.wake()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def abandon(self) -> None:
        """Ends the thread after its turn. At the end of the process, one that still runs the model could abort it."""
        self._stopping = self._abandoned = True
        self.wake()
        self._thread.join(ABANDON_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, jobs: Sequence[Job], is_streamed: bool = True) -> Answers:
        """Queues samples. BusyError if the queue has no room for all of them. is_streamed: pieces are wanted soon."""
        loop = asyncio.get_running_loop()
        if self._stopping:
            raise StoppingError("the server is stopping")
        answers = Answers(jobs, self.wake, is_streamed)
        if not any(job.length or job.scores_prompt for job in jobs):  # Nothing to read, or to make.
            for answer in answers.answers:
                answers.deliver(answer, Piece(finish="length"), None)
            return answers
        streams = [Stream(answers, answer, loop, self.config.context) for answer in answers.answers]
        with self._lock:
            held = list(self._held)
            room = self.queue + len(self._free) + sum(stream.done for stream in held) - len(self._new)
            numbers = sum(stream.job.numbers for stream in (*held, *self._new, *streams))
            if len(jobs) > room or (numbers > MOST_SCORED and any(job.numbers for job in jobs)):
                self.counts.refused += len(jobs)
                raise BusyError(self._retry_after())
            self._new.extend(streams)
            self.counts.waiting = len(self._new)
        self.wake()
        return answers

    async def run(self, work: Callable[[], Result]) -> Result:
        """Calls a function in the engine's thread, between two bytes, and returns its result."""
        if self._stopping:
            raise StoppingError("the server is stopping")
        future: Future[Result] = Future()
        self._calls.append((future, work))
        self.wake()
        return await asyncio.wrap_future(future)

    def wake(self) -> None:
        self._wake.set()

    def _retry_after(self) -> int:
        """Seconds until a place is likely free."""
        bytes_left = sum(stream.to_come for stream in self._held)
        return int(min(60, max(1, bytes_left * self._step_seconds / max(1, len(self._held)))))

    # In the thread.

    def _work(self) -> None:
        try:
            while not self._abandoned and self._go_on():
                pass
        except BaseException:
            LOG.exception("the engine has ended")
            self._stopping = True
            with self._lock:
                streams = [*self._held, *self._new]
                self._new.clear()
            for stream in streams:
                self._fail(stream, ModelError(FAILED))
            self._hand_over(streams)
            while self._calls:
                _call(self._calls.popleft()[0], _refuse)
            raise

    def _go_on(self) -> bool:
        """Takes a turn, or waits if there is nothing to do. Returns whether there will be more."""
        self._wake.clear()
        if self._calls and (self._owed_to_calls <= 0 or not self._running):  # Samples go on between two.
            begun = time.perf_counter()
            _call(*self._calls.popleft())
            self._owed_to_calls = time.perf_counter() - begun
        self._drop_left()
        self._admit()
        if not self._held and self._turn is None:
            if self._new or self._calls:
                return True
            if self._stopping:
                return False
            self._wake.wait()
            return True
        try:
            self._take_turn(self._read_prompts())
        except Exception:
            LOG.exception("the engine failed; it goes on with an empty batch")
            self._turn = None
            for stream in self._held:
                self._fail(stream, ModelError(FAILED))
        self._hand_over(self._held)
        return True

    @property
    def _running(self) -> int:
        """Streams that turns extend."""
        return sum(stream.is_running for stream in self._held)

    def _drop_left(self) -> None:
        """Frees the places of samples that have ended or that nobody waits for."""
        with self._lock:
            if any(stream.answer.ended for stream in self._new):
                self.counts.samples["left"] += sum(stream.answer.ended for stream in self._new)
                self._new = deque(stream for stream in self._new if not stream.answer.ended)
                self.counts.waiting = len(self._new)
        for stream in self._held:
            if stream.answer.ended and not stream.done:
                stream.done = True
                self.counts.samples["left"] += 1
        for stream in (freed := {stream for stream in self._held if stream.is_gone}):
            stream.joining = stream.leader = None
            self.places.leave(stream.place)
            self._free.append(stream.place)
        self._held = [stream for stream in self._held if stream not in freed]
        self._free.sort(reverse=True)  # Low places first: streams in adjacent places are computed together.

    def _admit(self) -> None:
        while self._free and self._new:
            with self._lock:
                stream = self._new.popleft()
                stream.place = self._free.pop()
                self.counts.waiting = len(self._new)
            stream.leader = next((held for held in self._held if held.reads_for(stream)), None)
            if stream.leader is not None:
                stream.leader.followers.append(stream)
            else:
                stream.joining = Joining(self.places, stream, self._joined)
            self._held.append(stream)
            self.counts.prompt_bytes += len(stream.job.prompt)
        self.counts.running = len(self._held)

    def _joined(self, stream: Stream) -> None:
        """Begins a stream that has its prompt, or ends it if that was all."""
        if stream.prompt_scores is not None:
            stream.pending().prompt_scores, scores = stream.prompt_scores, stream.prompt_scores
            stream.prompt_scores = None
            if not scores.is_finite:
                self._fail(stream, ModelError(NOT_FINITE))
        if not stream.job.length:
            self._finish(stream, "length")

    def _read_prompts(self) -> Reading | None:
        """Reads prompts for as long as they get (`Pace`). The next part is in turns that of the stream that has waited
        longest and that of the shortest prompt; one of several windows waits again after each."""
        running = self._running
        reading = self._pace.begin(sum(not stream.is_running and not stream.done for stream in self._held), running)
        if reading is None:
            return None
        has_time = True
        while has_time and (waiting := [one for one in self._held if one.joining is not None and not one.done]):
            self._parts += 1
            stream = min(waiting, key=lambda one: len(one.window)) if self._parts % 2 else waiting[0]
            joining = stream.joining
            assert joining is not None
            size: int | None = 0
            try:
                size = joining.read(waiting)
            except StopIteration:
                for read in joining.streams:
                    if read.joining is joining:
                        read.joining = None
            running = self._running
            if size is None:
                self._held.remove(stream)
                self._held.append(stream)
            has_time = self._pace.has_time(reading, size or 0, running)
        self._pace.end(reading)
        return reading

    def _take_turn(self, reading: Reading | None) -> None:
        """Launches the next bytes, and takes those that are there. reading: what was read just before."""
        context, mark = self.config.context, self.places.mark
        ready = [
            stream
            for stream in sorted(self._held, key=lambda stream: stream.place)
            if stream.is_running and stream.to_launch > 0 and stream.launched < context
        ]
        before, self._turn = self._turn, None
        if ready:
            scores = any(stream.job.likely is not None for stream in ready)
            room = min(context - stream.launched for stream in ready)
            steps = 1 if scores else min(room, self.places.most_steps(len(ready)))
            begin = mark()
            turn = self.places.extend([stream.place for stream in ready], steps, scores)
            self._turn = _Launched(turn, ready, steps, reading, begin, mark())
            for stream in ready:
                stream.launched += steps
                stream.to_launch -= steps
            self.counts.turns += 1
            self.counts.steps += steps
            if not self.places.is_async:
                before, self._turn = self._turn, None
        elif reading is not None:
            self._pace.settle(reading)
        if before is not None:
            self._take(before)

    def _take(self, launched: _Launched) -> None:
        """Gives the bytes of a turn to their streams."""
        turn = launched.turn
        for row, (stream, made) in enumerate(zip(launched.streams, turn.data())):
            if stream.done:  # Since the turn was launched.
                continue
            if made is None:
                self._fail(stream, ModelError(NOT_FINITE))
                continue
            made = made[: stream.to_come]
            likely = stream.job.likely
            scores = [] if likely is None else score(turn.logits()[row : row + 1], made, likely).listed()
            self.counts.bytes += len(made)
            finish = stream.add(made, scores)
            if finish is not None:
                self._finish(stream, finish)
            elif len(stream.window) == self.config.context:
                stream.slide()
                stream.joining = Joining(self.places, stream, self._joined)
        if launched.reading is not None:
            self._pace.settle(launched.reading)
        end = launched.end if self.places.is_async else self.places.mark()
        self._pace.turn_seconds = end.seconds_since(launched.begin)
        self._step_seconds = self._pace.turn_seconds / launched.steps
        self._owed_to_calls -= self._pace.turn_seconds

    def _finish(self, stream: Stream, finish: str) -> None:
        if not stream.done:
            stream.pending().finish = finish
            stream.done = True
            self.counts.samples[finish] += 1

    def _fail(self, stream: Stream, error: Exception) -> None:
        if not stream.done:
            stream.done, stream.error = True, error
            self.counts.samples["failed"] += 1


def _call(future: Future[Any], work: Callable[[], Any]) -> None:
    """Gives a future the result of a function, unless nobody waits for it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _refuse() -> None:
    raise ModelError(FAILED)
