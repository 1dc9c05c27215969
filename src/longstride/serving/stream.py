"""A sample in the engine's thread: the window of bytes that the model sees, and what is not yet handed over."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from longstride.sampling.generation import window_overlap
from longstride.sampling.scores import Score, Scores
from longstride.serving.answers import Answer, Answers, Piece
from longstride.serving.stops import Stops


class PromptReader(Protocol):
    """Reads the windows of one or more streams (`Joining`)."""

    streams: list["Stream"]

    @property
    def has_begun(self) -> bool: ...

    @property
    def is_wanted(self) -> bool: ...

    def read(self, waiting: Iterable["Stream"]) -> int | None: ...


class Stream:
    """A sample in the engine's thread."""

    def __init__(self, answers: Answers, answer: Answer, loop: asyncio.AbstractEventLoop, context: int) -> None:
        job = answer.job
        self.answers, self.answer, self.loop, self.job, self.context = answers, answer, loop, job, context
        self.window = bytearray(job.prompt)
        """The bytes of the context so far."""
        self.start = 0
        """Bytes before the window."""
        most = context - 1 if job.length else context
        while len(self.window) - self.start > most:
            self.start += window_step(context)
        del self.window[: self.start]
        self.launched = len(self.window)
        """Bytes of the window that are there or being made."""
        self.to_launch = self.to_come = job.length
        self.place = -1
        self.joining: PromptReader | None = None
        """Reads the window's bytes, part by part; perhaps those of other streams, too."""
        self.leader: Stream | None = None
        """A sample of the same request that reads the same prompt, of which this one gets a copy."""
        self.followers: list[Stream] = []
        """Those whose leader this is."""
        self.prompt_scores: Scores | None = None
        self.stops = Stops(job.stop)
        self.held_scores: list[Score] = []
        self.piece: Piece | None = None
        self.is_silent = True
        """Whether nothing has been handed over yet."""
        self.error: Exception | None = None
        self.done = False

    @property
    def is_running(self) -> bool:
        """Whether it has its prompt, and turns extend it."""
        return self.joining is None and self.leader is None and not self.done

    @property
    def is_gone(self) -> bool:
        """Whether it is done, and nothing writes to its place."""
        return self.done and (self.joining is None or not self.joining.is_wanted)

    def reads_for(self, other: "Stream") -> bool:
        """Whether it is about to have the prompt of another sample of its request."""
        is_first = self.joining is not None and self.has_made_nothing  # It reads no later window.
        return is_first and self.answers is other.answers and self.job.prompt == other.job.prompt != b""

    @property
    def has_made_nothing(self) -> bool:
        return self.to_come == self.job.length

    @property
    def scores_prompt(self) -> bool:
        """Whether the window that is read next is scored."""
        return self.job.scores_prompt and self.has_made_nothing

    def slide(self) -> None:
        """Makes the last half of a full window the beginning of the next."""
        del self.window[: window_step(self.context)]
        self.start += window_step(self.context)
        self.launched = len(self.window)

    def add(self, data: bytes, scores: list[Score]) -> str | None:
        """Takes bytes that the model has made, at most as many as are to come. Returns why the sample ends, if it does."""
        self.window += data
        self.to_come -= len(data)
        shown = self.stops.push(data)
        finish = "stop" if self.stops.found else None if self.to_come else "length"
        if finish == "length":
            shown += self.stops.flush()
        self.held_scores += scores
        if shown:
            piece = self.pending()
            piece.data += shown
            piece.scores += self.held_scores[: len(shown)]
            del self.held_scores[: len(shown)]
        return finish

    def pending(self) -> Piece:
        """The piece that is handed over next."""
        self.piece = self.piece or Piece()
        return self.piece


def window_step(context: int) -> int:
    """Returns how far a window slides."""
    return context - window_overlap(context)
