"""Batches that are a pure function of seed, step and rank, so resuming, also with another world size, needs no saved state.

`Sequences` defines the batch of a step; `Prefetch` prepares the next batches in a thread, in pinned memory for a GPU.
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
"""Batches that are prepared in advance."""
POLL_SECONDS = 0.1
"""Seconds between two attempts to end the thread."""


class Sequences:
    """The sequences of a split: its items (images), or windows at any position of a stream."""

    def __init__(self, data: Bytes, context: int, item_bytes: int | None = None, name: str = "data") -> None:
        if item_bytes is not None and item_bytes != context:
            raise ValueError(
                f"{name} has items of {item_bytes:,} bytes, and the model's context is {context:,}; they must agree"
            )
        if len(data) < context:
            raise ValueError(
                f"{name} has {len(data):,} bytes, less than one sequence of the context = {context:,}; give more data or a "
                "smaller context"
            )
        self.data = data
        self.context = context
        self.items = None if item_bytes is None else len(data) // item_bytes

    def starts(self, seed: int, step: int, size: int, rank: int = 0, ranks: int = 1) -> Places:
        """Returns the offsets of this rank's sequences. The batch over all ranks is the same for any world size."""
        if size % ranks:
            raise ValueError(f"batch = {size} must be a multiple of the {ranks} processes")
        if self.items is None:
            places = _generator(seed, step).integers(0, len(self.data) - self.context + 1, size)
        else:  # Every item once per epoch.
            indices = range(step * size, (step + 1) * size)
            chosen = [_order(seed, index // self.items, self.items)[index % self.items] for index in indices]
            places = np.array(chosen, np.int64) * self.context
        own = size // ranks
        return places[rank * own : (rank + 1) * own]

    def batch(self, seed: int, step: int, size: int, rank: int = 0, ranks: int = 1) -> Bytes:
        """Returns this rank's part of a step's batch, [size / ranks, context]."""
        return self.at(self.starts(seed, step, size, rank, ranks))

    def at(self, starts: Places) -> Bytes:
        return np.stack([self.data[start : start + self.context] for start in starts])

    def spread(self, most: int) -> Places:
        """Returns the offsets of up to `most` sequences without overlap, evenly spaced over the split. Deterministic."""
        count = len(self.data) // self.context
        return np.linspace(0, count - 1, min(most, count)).round().astype(np.int64) * self.context


class Prefetch:
    """Yields the batches of steps `start` to `end` on a device. `waited`: seconds spent waiting for a batch."""

    def __init__(
        self, sequences: Sequences, seed: int, size: int, start: int, end: int, device: torch.device, rank: int = 0,
        ranks: int = 1,
    ) -> None:  # fmt: skip
        self.device = device
        self.waited = 0.0
        self._queue: Queue[Tensor | BaseException | None] = Queue(AHEAD)
        self._stopped = Event()
        arguments = (sequences, seed, size, start, end, rank, ranks)
        self._thread = Thread(target=self._load_batches, args=arguments, daemon=True, name="longstride loader")
        self._thread.start()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            begun = perf_counter()
            entry = self._queue.get()
            self.waited += perf_counter() - begun
            if entry is None:
                return
            if isinstance(entry, BaseException):
                raise entry
            yield entry.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Stops the thread."""
        self._stopped.set()
        while self._thread.is_alive():
            with suppress(Empty):
                self._queue.get(timeout=POLL_SECONDS)
            self._thread.join(POLL_SECONDS)

    def _load_batches(
        self, sequences: Sequences, seed: int, size: int, start: int, end: int, rank: int, ranks: int
    ) -> None:  # fmt: skip
        try:
            for step in range(start, end):
                if self._stopped.is_set():
                    return
                batch = torch.from_numpy(sequences.batch(seed, step, size, rank, ranks))
                self._queue.put(batch.pin_memory() if self.device.type == "cuda" else batch)
            self._queue.put(None)
        except BaseException as error:  # Raised in the consumer.
            self._queue.put(error)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@lru_cache(maxsize=4)  # A batch may span two epochs, and two threads may call.
def _order(seed: int, epoch: int, items: int) -> Places:
    return _generator(seed, epoch).permutation(items)


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
