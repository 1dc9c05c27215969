"""Joining: reads the prompts of streams into their places, part by part.

Where the places can do that, prompts of similar lengths that wait at the same time are read together. One sample of a
request reads for all that have the same prompt.
"""

from collections.abc import Callable, Generator, Iterable

import torch

from longstride.sampling.arrivals import Arrival, most_together, padded_length
from longstride.sampling.places import SCORED, Places
from longstride.sampling.sampler import random_state
from longstride.sampling.scores import Scores, empty_scores
from longstride.serving.stream import Stream, window_step


class Joining:
    """Reads the bytes of a stream's window, or the windows of several streams, and scores the whole prompts if that is asked
    for; then copies what their followers need."""

    def __init__(self, places: Places, stream: Stream, joined: Callable[[Stream], None]) -> None:
        """joined: is called with each stream that has its prompt."""
        self.places, self.streams, self.joined = places, [stream], joined
        self._parts: Generator[int | None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._parts is not None

    @property
    def is_wanted(self) -> bool:
        """Whether one of its streams still waits. As long as one does, this writes to the places of all of them. Those that
        have their prompts do not wait: if they did, a place that was left would not be free before they end."""
        return any(stream.joining is self and not stream.done for stream in self.streams)

    def read(self, waiting: Iterable[Stream]) -> int | None:
        """Does the next part of the work. waiting: streams that wait for their prompts; at its beginning, some may join.

        Returns the positions of a part that was launched, 0 after other work, and None after each window but the last.
        StopIteration if there is nothing left to do.
        """
        if self._parts is None:
            self._gather(waiting)
            self._parts = self._read()
        return next(self._parts)

    def _gather(self, waiting: Iterable[Stream]) -> None:
        """Takes on the streams whose windows can be read with that of its own."""
        (own,) = self.streams
        if not self.places.reads_together or _reads_several(own):
            return
        length = padded_length(len(own.window))
        for stream in waiting:
            if len(self.streams) == most_together(length):
                break
            is_free = stream is not own and stream.joining is not None and not stream.joining.has_begun
            if is_free and not _reads_several(stream) and padded_length(len(stream.window)) == length:
                stream.joining = self
                self.streams.append(stream)

    def _read(self) -> Generator[int | None]:
        scores = [_room_for_scores(stream) for stream in self.streams]
        first = self.streams[0]
        if _reads_several(first):
            for start in range(0, first.start, window_step(first.context)):
                window = first.job.prompt[start : start + first.context]
                (hidden,) = yield from self.places.join([_arrival(first, window, start)])
                yield from self._score(first, scores[0], hidden, window, start)
                yield None
        arrivals = [_arrival(stream, bytes(stream.window), stream.start) for stream in self.streams]
        outputs = yield from self.places.join(arrivals)
        # Those that are scored come last: the others need not wait for them.
        for at in sorted(range(len(self.streams)), key=lambda at: scores[at] is not None):
            stream, (_, window, *_) = self.streams[at], arrivals[at]
            if stream.done:  # It has left meanwhile.
                continue
            yield from self._score(stream, scores[at], outputs[at], window, stream.start)
            yield from self._share(stream, scores[at], len(window))

    def _score(
        self, stream: Stream, scores: Scores | None, hidden: torch.Tensor | None, window: bytes, start: int
    ) -> Generator[int]:  # fmt: skip
        """Scores the bytes of a window that the one before has not. hidden: the output of the last block."""
        if scores is None or hidden is None:
            return
        for first in range(stream.context - window_step(stream.context) if start else 0, len(window), SCORED):
            part = slice(first, first + SCORED)
            scores.put(start + first, self.places.logits(hidden[part]), window[part])
            yield 0

    def _share(self, stream: Stream, scores: Scores | None, size: int) -> Generator[int]:
        """Gives what was read to the stream and to its followers. size: bytes of its window."""
        for follower in stream.followers:  # Others may come while these are served.
            if follower.done:  # It has left, and its place may be another's.
                continue
            follower.prompt_scores = scores
            if stream.job.length:
                self.places.copy(stream.place, follower.place, _state(follower, stream.start), stream.job.params)
            follower.leader = None
            self.joined(follower)
            yield size
        stream.followers.clear()
        stream.prompt_scores, stream.joining = scores, None
        self.joined(stream)


def _reads_several(stream: Stream) -> bool:
    """Whether its prompt is scored in several windows."""
    return stream.scores_prompt and stream.start > 0


def _room_for_scores(stream: Stream) -> Scores | None:
    return empty_scores(len(stream.job.prompt), stream.job.likely or 0) if stream.scores_prompt else None


def _arrival(stream: Stream, window: bytes, start: int) -> Arrival:
    return Arrival(stream.place, window, _state(stream, start), stream.job.params)


def _state(stream: Stream, start: int) -> int:
    """Returns the random state of a stream whose window begins at `start`."""
    state = int(random_state(stream.job.seed, torch.tensor([stream.job.index]))[0])
    return (state + start + 2**63) % 2**64 - 2**63
