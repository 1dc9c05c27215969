"""Batches that are a pure function of seed, step and rank: to resume, or to go on with other ranks, needs no saved state.

`Sequences` says what a step's batch is; `Prefetch` has the next ones ready, in pinned memory for a GPU, while a step runs.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from queue import Empty, Queue
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
AHEAD = 3
"""Batches that are ready."""
NOTICES = 0.1
"""Seconds until one who waits for the other thread looks again."""


class Sequences:
    """The sequences of a split: its items, if it has them (images), and else windows that begin anywhere."""

    def __init__(self, data: Bytes, context: int, item_bytes: int | None = None, name: str = "data") -> None:
        if item_bytes is not None and item_bytes != context:
            raise ValueError(
                f"{name} has items of {item_bytes:,} bytes, and the model's context is {context:,}: give it that"
            )
        if len(data) < context:
            raise ValueError(f"{name} has {len(data):,} bytes, less than one sequence of the context = {context:,}")
        self.data = data
        self.context = context
        self.items = None if item_bytes is None else len(data) // item_bytes

    def starts(self, seed: int, step: int, size: int, rank: int = 0, ranks: int = 1) -> Places:
        """Where this rank's part of a step's batch begins. All ranks' parts together are the same for any number of them."""
        if size % ranks:
            raise ValueError(f"batch = {size} must be a multiple of the {ranks} processes")
        if self.items is None:
            places = _generator(seed, step).integers(0, len(self.data) - self.context + 1, size)
        else:  # Each item once before any comes again.
            numbers = range(step * size, (step + 1) * size)
            chosen = [_order(seed, number // self.items, self.items)[number % self.items] for number in numbers]
            places = np.array(chosen, np.int64) * self.context
        own = size // ranks
        return places[rank * own : (rank + 1) * own]

    def batch(self, seed: int, step: int, size: int, rank: int = 0, ranks: int = 1) -> Bytes:
        """[size / ranks, context]"""
        return self.at(self.starts(seed, step, size, rank, ranks))

    def at(self, starts: Places) -> Bytes:
        return np.stack([self.data[start : start + self.context] for start in starts])

    def spread(self, most: int) -> Places:
        """The starts of up to `most` sequences that do not overlap, evenly over the split: always the same ones."""
        count = len(self.data) // self.context
        return np.linspace(0, count - 1, min(most, count)).round().astype(np.int64) * self.context


class Prefetch:
    """Yields the batches of steps from `start` to `end` on a device. `waited` are the seconds in which none was ready."""

    def __init__(
        self, sequences: Sequences, seed: int, size: int, start: int, end: int, device: torch.device, rank: int = 0,
        ranks: int = 1,
    ) -> None:  # fmt: skip
        self.device = device
        self.waited = 0.0
        self._queue: Queue[Tensor | BaseException | None] = Queue(AHEAD)
        self._stopped = Event()
        arguments = (sequences, seed, size, start, end, rank, ranks)
        self._thread = Thread(target=self._work, args=arguments, daemon=True, name="longstride loader")
        self._thread.start()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            begun = perf_counter()
            found = self._queue.get()
            self.waited += perf_counter() - begun
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Ends the thread, whatever it is at."""
        self._stopped.set()
        while self._thread.is_alive():
            with suppress(Empty):
                self._queue.get(timeout=NOTICES)
            self._thread.join(NOTICES)

    def _work(
        self, sequences: Sequences, seed: int, size: int, start: int, end: int, rank: int, ranks: int
    ) -> None:  # fmt: skip
        try:
            for step in range(start, end):
                if self._stopped.is_set():
                    return
                batch = torch.from_numpy(sequences.batch(seed, step, size, rank, ranks))
                self._queue.put(batch.pin_memory() if self.device.type == "cuda" else batch)
            self._queue.put(None)
        except BaseException as error:  # Raised where the batch is wanted.
            self._queue.put(error)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@lru_cache(maxsize=4)  # A batch may have items of two epochs, and two threads may ask.
def _order(seed: int, epoch: int, items: int) -> Places:
    return _generator(seed, epoch).permutation(items)


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
