"""Places on a GPU: one CUDA graph makes a byte of each stream, whatever their positions.

A stream that is alone is extended by the persistent kernel instead, which is much faster for one, and works on the same
cache. It rounds differently, so where the random number falls between two bytes it may choose the other one. With `exact`,
the graph of all places serves a single stream, too.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.sampling.batched import BatchedStreams
from longstride.sampling.decoder import prefill_parts
from longstride.sampling.kernels.arguments import Choice, PlacedStreams
from longstride.sampling.kernels.batched import end_placed_step
from longstride.sampling.kernels.common import BYTES, START
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

    def __init__(self, made: Tensor, rows: list[Tensor], broken: Tensor, logits: Tensor | None) -> None:
        """made: bytes [streams, n]; rows: which of them are new, for each stream; broken: int32 [streams]."""
        self._made, self._broken = (x.to("cpu", non_blocking=True) for x in (made, broken))
        self._rows, self._logits = rows, logits
        self._ready = torch.cuda.current_stream(made.device).record_event() if made.is_cuda else None

    def data(self) -> list[bytes | None]:
        if self._ready is not None:
            self._ready.synchronize()
        streams = zip(self._made, self._rows, self._broken.tolist())
        return [None if broken else bytes(made[new].tolist()) for made, new, broken in streams]

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
            active = torch.zeros(self.batch, dtype=torch.int32)
            active[list(places)] = 1
            self.placed.active.copy_(active)
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
        self.alone: ResidentStreams | None = None
        if not exact and fits(model.config, 1, self.device):
            self.alone = ResidentStreams(model, 1, model.config.context, shared=self.batch)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._positions = [0] * count
        self._params = [SamplingParams()] * count

    def most_steps(self, streams: int) -> int:
        return ALONE if streams == 1 and self.alone is not None else TOGETHER

    @torch.inference_mode()
    def join(self, place: int, prompt: bytes, state: int, params: SamplingParams) -> Generator[None, None, Tensor | None]:
        self.batch.park(place, len(prompt))
        hidden = None
        if prompt:
            tokens = torch.tensor([list(prompt)], dtype=torch.uint8, device=self.device)
            for output in prefill_parts(self.batch.model, self.batch.cache, tokens, slice(place, place + 1)):
                hidden = output[0]
                yield
        self.batch.begin(place, prompt[-1] if prompt else START.value, state, params)
        self._positions[place], self._params[place] = len(prompt), params
        return hidden

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
        chosen = torch.tensor(places, device=self.device)
        new = []
        for place in places:
            new.append(torch.arange(self._positions[place], self._positions[place] + steps) % NEWEST)
            self._positions[place] += steps
        logits = self.batch.logits[chosen] if keeps_logits else None
        return KernelTurn(self.batch.placed.made[chosen], new, self.batch.placed.broken[chosen], logits)

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
        return KernelTurn(made, [torch.arange(steps)], broken, alone.logits.clone() if keeps_logits else None)
