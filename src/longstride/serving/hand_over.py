"""Hand-over: gives the pieces of samples from the engine's thread to the event loops that wait for them.

An event loop takes some 0.1 ms to render and send a piece, and holds the interpreter's lock that the engine needs, too. So
pieces come at once only if they begin or end a sample, and others from time to time.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from longstride.serving.answers import Answer, Answers, Piece
from longstride.serving.stream import Stream

HAND_OVER_SECONDS, PIECE_SECONDS = 0.02, 0.001
"""Least time between two pieces of a sample that is streamed: in all, and for each sample that there is."""
WHOLE_SECONDS = 0.5
"""Least time between two pieces of a sample that is sent whole, which is rendered as it grows."""


class _Delivery(NamedTuple):
    """A piece on its way to the event loop, or an error."""

    answers: Answers
    answer: Answer
    piece: Piece | None
    error: Exception | None


class HandOver:
    def __init__(self) -> None:
        self._last = {True: 0.0, False: 0.0}
        """When pieces were handed over of samples that are streamed, and of those that are not."""

    def __call__(self, streams: Sequence[Stream]) -> None:
        """Gives what is due to the event loops. streams: all samples with a place."""
        now = time.perf_counter()
        between = {True: max(HAND_OVER_SECONDS, PIECE_SECONDS * len(streams)), False: WHOLE_SECONDS}
        due = [kind for kind, seconds in between.items() if now - self._last[kind] >= seconds]
        self._last.update(dict.fromkeys(due, now))
        ready: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for stream in streams:
            is_streamed = stream.answers.is_streamed
            is_due = is_streamed in due or stream.done or (stream.is_silent and is_streamed)
            if stream.error is not None or (stream.piece is not None and is_due):
                delivery = _Delivery(stream.answers, stream.answer, stream.piece, stream.error)
                ready.setdefault(stream.loop, []).append(delivery)
                stream.piece, stream.is_silent = None, False
        for loop, pieces in ready.items():
            try:
                loop.call_soon_threadsafe(_deliver, pieces)
            except RuntimeError:  # The loop is closed.
                for delivery in pieces:
                    delivery.answer.ended = True


def _deliver(pieces: Sequence[_Delivery]) -> None:
    for answers, answer, piece, error in pieces:
        answers.deliver(answer, piece, error)
