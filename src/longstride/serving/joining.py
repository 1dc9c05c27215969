"""Joining: reads the prompt of a stream into its place, part by part, once for samples of a request with the same prompt."""

from collections.abc import Callable, Generator

import torch

from longstride.sampling.places import SCORED, Places
from longstride.sampling.sampler import random_state
from longstride.sampling.scores import empty_scores
from longstride.serving.stream import Stream, window_step


def join(places: Places, stream: Stream, is_new: bool, joined: Callable[[Stream], None]) -> Generator[int | None]:
    """Reads the bytes of a stream's window, and scores the whole prompt if that is asked for; then copies what its followers
    need. Calls `joined` with each stream that has its prompt.

    Yields the bytes of each part that was launched, 0 after other work, and None after each window but the last.
    """
    job, context, step = stream.job, stream.context, window_step(stream.context)
    scores = empty_scores(len(job.prompt), job.likely or 0) if is_new and job.scores_prompt else None
    for start in range(0 if scores else stream.start, stream.start + 1, step):
        # The last window is the stream's own.
        window = bytes(stream.window) if start == stream.start else job.prompt[start : start + context]
        hidden = yield from places.join(stream.place, window, _state(stream, start), job.params)
        if scores and hidden is not None:
            for first in range(context - step if start else 0, len(window), SCORED):
                part = slice(first, first + SCORED)
                scores.put(start + first, places.logits(hidden[part]), window[part])
                yield 0
        if start < stream.start:
            yield None
    stream.prompt_scores = scores
    for follower in stream.followers:  # Others may come while these are served.
        if follower.done:  # It has left, and its place may be another's.
            continue
        follower.prompt_scores = scores
        if job.length:
            places.copy(stream.place, follower.place, _state(follower, start), job.params)
        follower.leader = None
        joined(follower)
        yield len(window)
    stream.followers.clear()
    joined(stream)


def _state(stream: Stream, start: int) -> int:
    """Returns the random state of a stream whose window begins at `start`."""
    state = int(random_state(stream.job.seed, torch.tensor([stream.job.index]))[0])
    return (state + start + 2**63) % 2**64 - 2**63
