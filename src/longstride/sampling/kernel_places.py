"""Places on a GPU: one CUDA graph makes a byte of each stream, whatever their positions.

A stream that is alone is extended by the persistent kernel instead, which is much faster for one, and works on the same
cache. It rounds differently, so where the random number falls between two bytes it may choose the other one. Prompts that
are read together may round differently, too. With `exact`, each prompt is read alone, and the graph of all places serves a
single stream, too.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.sampling.arrivals import Arrival, read_prompts
from longstride.sampling.batched import BatchedStreams
from longstride.sampling.kernels.arguments import Choice, PlacedStreams
from longstride.sampling.kernels.batched import end_placed_step
from longstride.sampling.kernels.common import BYTES, START
from longstride.sampling.marks import Mark, set_mark
from longstride.sampling.params import SamplingParams
from longstride.sampling.resident import ResidentStreams, fits

TOGETHER, ALONE = 8, 32
"""The most bytes of a turn of several streams, and of one: those that a stream waits for before it joins."""
NEWEST = 64
"""The newest bytes of each stream that are kept on the GPU: more than two turns have."""
UNFILTERED = 2.0
"""A top_p that keeps every byte, whatever the rounding of sums."""


class KernelTurn:
    """Bytes on their way from the GPU."""

    def __init__(
        self, made: Tensor, broken: Tensor, streams: list[tuple[int, int]], steps: int, logits: Tensor | None
    ) -> None:  # fmt: skip
        """made: rings of the newest bytes, [rows, size]; broken: int32 [rows]; streams: the row and the first position of
        each stream."""
        self._made, self._broken = (x.to("cpu", non_blocking=True) for x in (made, broken))
        self._streams, self._steps, self._logits = streams, steps, logits
        self._ready = torch.cuda.current_stream(made.device).record_event() if made.is_cuda else None

    def data(self) -> list[bytes | None]:
        if self._ready is not None:
            self._ready.synchronize()
        broken, size = self._broken.tolist(), self._made.shape[1]
        twice = self._made.numpy().repeat(2, 0).reshape(len(self._made), -1)  # So that the end of a ring goes on.
        found: list[bytes | None] = []
        for row, first in self._streams:
            at = first % size
            found.append(None if broken[row] else twice[row, at : at + self._steps].tobytes())
        return found

    def logits(self) -> Tensor:
        assert self._logits is not None
        return self._logits


class PlacedBatch(BatchedStreams):
    """The streams of all places: some go on, others wait."""

    each = True

    def __init__(self, model: SparseTransformer, count: int) -> None:
        super().__init__(model, count, model.config.context)

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        self.visible = self.visible_slots(count)._replace(position=zeros(torch.int32))
        self.placed = PlacedStreams(
            active=zeros(torch.int32), random_states=zeros(torch.int64), last_bytes=self.last_bytes,
            made=torch.zeros(count, NEWEST, dtype=torch.uint8, device=self.device), broken=zeros(torch.int32),
        )  # fmt: skip
        self.choice = Choice(*(zeros(dtype) for dtype in (torch.float32, torch.int32, torch.float32)))
        self.choice.temperature.fill_(1)
        self._active: tuple[int, ...] = ()

    def park(self, place: int, position: int) -> None:
        """Sets the position at which a place computes while it waits, which spoils nothing (`end_placed_step`)."""
        self.visible.position[place].fill_(min(position, self.length - 1))

    def begin(self, place: int, byte: int, state: int, params: SamplingParams) -> None:
        """Sets what the next byte depends on, beside the cache and the position."""
        placed, choice = self.placed, self.choice
        values = (byte, state, 0, params.temperature, params.top_k or BYTES.value, params.top_p or UNFILTERED)
        tensors = (
            self.last_bytes[0], placed.random_states, placed.broken, choice.temperature, choice.top_k, choice.top_p
        )  # fmt: skip
        for tensor, value in zip(tensors, values):
            tensor[place].fill_(value)

    def run(self, places: tuple[int, ...], steps: int, has_filter: bool) -> None:
        """Makes bytes of the streams in these places."""
        if places != self._active:
            active = torch.zeros(self.batch, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            active[list(places)] = 1
            self.placed.active.copy_(active, non_blocking=True)
            self._active = places
        for _ in range(steps):
            self._replay(has_filter)

    def _choose(self, has_filter: bool) -> None:
        end_placed_step[(self.batch,)](
            self.logits, self.placed, self.visible.position, self.choice, self.length, SIZE=NEWEST, FILTERED=has_filter
        )  # fmt: skip


class KernelPlaces:
    """`Places` with the sampling kernels."""

    is_async = True

    def __init__(self, model: SparseTransformer, count: int, exact: bool = False) -> None:
        self.count, self.exact = count, exact
        self.batch = PlacedBatch(model, count)
        self.device = self.batch.device
        self.runs_ahead = self.device.type == "cuda"
        self.reads_together = self.runs_ahead and not exact
        self.alone: ResidentStreams | None = None
        if not exact and fits(model.config, 1, self.device):
            self.alone = ResidentStreams(model, 1, model.config.context, shared=self.batch)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._positions = [0] * count
        self._params = [SamplingParams()] * count
        if self.device.type == "cuda":
            self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compiles the kernels and captures the graphs, for which the first client would wait."""
        with self.batch.device_context():
            for _ in self.join([Arrival(0, b"\n", 0, SamplingParams())]):
                pass
            for has_filter in (True, False):
                self.batch.run((), 1, has_filter)
        if self.alone is not None:
            self._extend_alone(self.alone, 0, 1, keeps_logits=False)
        self.leave(0)

    def mark(self) -> Mark:
        return set_mark(self.device)

    def most_steps(self, streams: int) -> int:
        return ALONE if streams == 1 and self.alone is not None else TOGETHER

    @torch.inference_mode()
    def join(self, arrivals: Sequence[Arrival]) -> Generator[int, None, list[Tensor | None]]:
        for place, prompt, *_ in arrivals:
            self.batch.park(place, len(prompt))
        hidden = yield from read_prompts(self.batch.model, self.batch.cache, arrivals, self.reads_together)
        for place, prompt, state, params in arrivals:
            self.batch.begin(place, prompt[-1] if prompt else START.value, state, params)
            self._positions[place], self._params[place] = len(prompt), params
        return hidden

    @torch.inference_mode()
    def copy(self, source: int, place: int, state: int, params: SamplingParams) -> None:
        position = self._positions[source]
        self.batch.park(place, position)
        if position:
            self.batch.cache.copy(source, place, position)
        self.batch.begin(place, START.value, state, params)
        self.batch.last_bytes[0, place].copy_(self.batch.last_bytes[0, source])
        self._positions[place], self._params[place] = position, params

    @torch.inference_mode()
    def leave(self, place: int) -> None:
        self.batch.park(place, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.batch.model.logits(hidden[None])[0]

    @torch.inference_mode()
    def extend(self, places: Sequence[int], steps: int, keeps_logits: bool = False) -> KernelTurn:
        assert steps <= NEWEST // 2
        assert all(self._positions[place] + steps <= self.batch.length for place in places)
        if len(places) == 1 and self.alone is not None:
            return self._extend_alone(self.alone, places[0], steps, keeps_logits)
        has_filter = self.exact or any(self._params[place].has_filter for place in places)
        with self.batch.device_context():
            self.batch.run(tuple(places), steps, has_filter)
        streams = [(place, self._positions[place]) for place in places]
        for place in places:
            self._positions[place] += steps
        logits = self.batch.logits[torch.tensor(places, device=self.device)] if keeps_logits else None
        return KernelTurn(self.batch.placed.made, self.batch.placed.broken, streams, steps, logits)

    def _extend_alone(self, alone: ResidentStreams, place: int, steps: int, keeps_logits: bool) -> KernelTurn:
        """Extends one stream by the persistent kernel, in this place's part of the cache."""
        batch, last = self.batch, self.batch.last_bytes[0, place]
        alone.tables.select(place)
        alone.position = self._positions[place]
        alone.last_bytes.copy_(last.expand_as(alone.last_bytes))
        made = alone.extend(steps, self._nothing, batch.placed.random_states[place : place + 1], self._params[place])
        self._positions[place] += steps
        last.copy_(alone.last_bytes[0, 0])
        batch.park(place, self._positions[place])
        broken = (~alone.logits.isfinite().all(1)).int()
        return KernelTurn(made, broken, [(0, 0)], steps, alone.logits.clone() if keeps_logits else None)
