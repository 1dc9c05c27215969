"""Answers: the samples that a request asks for, and their pieces as they come."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from longstride.sampling.params import SamplingParams
from longstride.sampling.scores import Score, Scores


@dataclass(frozen=True)
class Job:
    """One sample to make."""

    prompt: bytes
    length: int
    """Bytes to make; 0 only scores the prompt."""
    params: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    seed: int = 0
    index: int = 0
    """Of the sample among those of the seed, as in `generate`."""
    stop: tuple[bytes, ...] = ()
    likely: int | None = None
    """With a number, bytes are scored, and each score has so many of the likeliest bytes."""
    scores_prompt: bool = False

    @property
    def numbers(self) -> int:
        """Bytes and logprobs that its scores have."""
        scored = self.length + (len(self.prompt) if self.scores_prompt else 0)
        return 0 if self.likely is None else scored * (2 + self.likely)


@dataclass
class Piece:
    """A part of an answer."""

    data: bytes = b""
    scores: list[Score] = field(default_factory=list)
    """Of each byte of `data`, if the job asks for them."""
    prompt_scores: Scores | None = None
    finish: str | None = None
    """Why the answer ends: "stop" or "length"; None if it goes on."""


class Answer:
    """One sample of a request, as it is made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.pieces: deque[Piece] = deque()
        """Not yet read."""
        self.ended = False
        """Whether nothing more comes, or nobody waits for it."""

    def take(self) -> Piece | None:
        """Returns all pieces that have come as one: a reader that is slow gets fewer and longer ones."""
        if not self.pieces:
            return None
        whole = self.pieces.popleft()
        while self.pieces:
            piece = self.pieces.popleft()
            whole.data += piece.data
            whole.scores += piece.scores
            if piece.prompt_scores is not None:
                whole.prompt_scores = piece.prompt_scores
            whole.finish = piece.finish
        return whole


class Answers:
    """The samples of a request: iterate over (index, piece), in the event loop that submitted it, until all have ended.

    Leave them with `cancel`, after which the iteration ends, too."""

    def __init__(self, jobs: Sequence[Job], wake: Callable[[], None], is_streamed: bool = True) -> None:
        self.answers, self.is_streamed = [Answer(job) for job in jobs], is_streamed
        self._wake = wake
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self.is_cancelled = False
        """Whether not all of them were made."""

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                if self._error is not None:
                    raise self._error
                for index, answer in enumerate(self.answers):
                    if (piece := answer.take()) is not None:
                        yield index, piece
                if all(answer.ended and not answer.pieces for answer in self.answers):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Frees the places of these samples, also those in the queue. Nothing happens to one that has ended."""
        if not all(answer.ended for answer in self.answers):
            self.is_cancelled = True
            for answer in self.answers:
                answer.ended = True
                answer.pieces.clear()
            self._arrived.set()
            self._wake()

    def deliver(self, answer: Answer, piece: Piece | None, error: Exception | None) -> None:
        if answer.ended:
            return
        if piece is not None:
            answer.pieces.append(piece)
            answer.ended = piece.finish is not None
        if error is not None:
            self._error = error
            answer.ended = True
        self._arrived.set()
