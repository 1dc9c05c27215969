"""Places in plain PyTorch: products over all streams at once, attention over streams that read equally many keys.

Streams do not change each other's bits. Products have a multiple of ROWS rows, of which the last is padding, unless their
rows never depend on each other; and what a query reads, and in which order, follows from its position alone (`_Window`).
"""

from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.model.config import BYTES
from longstride.model.decode import View, views
from longstride.sampling.arrivals import Arrival, read_prompts
from longstride.sampling.decoder import (
    SINGLE_THREAD_PRODUCTS,
    cpu_threads,
    in_float32,
    make_cache,
)
from longstride.sampling.marks import Mark, set_mark
from longstride.sampling.params import SamplingParams
from longstride.sampling.position import NetworkPosition, Products, Rotation, byte_tables, position_tables
from longstride.sampling.sampler import pick_bytes, probabilities, uniform

ROWS = 8
"""Rows of a product are a multiple of this, from which on a CPU rounds them independently of their number."""
WINDOW = 64
"""Positions whose tables are made at a time. Windows begin at its multiples, so that streams share them."""
WINDOW_BYTES = 2**28
"""The most bytes of tables that are kept, apart from those of the streams themselves."""
MOST_NETWORKS = 8
"""Numbers of streams whose buffers are kept."""


class _Window:
    """Tables for some positions: embeddings, rotations, and for each entry of the cycle of blocks its views."""

    def __init__(self, learned: Sequence[Tensor], rotations: list[Rotation | None], entries: list[list[View]]) -> None:
        self.learned, self.rotations, self.entries = learned, rotations, entries
        seen = (view for entry in entries for view in entry)
        self.bytes = sum(view.bias.nbytes + (0 if view.listed is None else view.listed.nbytes) for view in seen)


@dataclass(frozen=True)
class _Run:
    """Adjacent streams that read equally many slots."""

    rows: slice
    """Their heads, among those of the streams that are extended."""
    places: slice
    """Their heads, among those of all places."""
    bias: Tensor
    """[heads, 1, most]"""
    listed: Tensor | None
    """The slots that are read, indices into those of all places; None: the first `most` of each head."""
    blind: Tensor | None
    """[heads, 1, 1]: whether a query sees no key; None: every query sees one."""


@dataclass(frozen=True)
class _Reading:
    """What the streams keep and read in the blocks of one entry of the cycle."""

    own: Tensor
    """Where new keys are stored: indices into the slots of all places."""
    keeping: Tensor | None
    """The heads of all streams that keep theirs; None: all."""
    runs: list[_Run]


class _Stream:
    """The bytes of a place and how the next one is drawn."""

    def __init__(self, prompt: bytes, state: int, params: SamplingParams) -> None:
        self.data, self.state, self.params = bytearray(prompt), state, params


class TorchTurn:
    """One byte of each stream."""

    def __init__(self, made: list[bytes | None], logits: Tensor) -> None:
        self._made, self._logits = made, logits

    def data(self) -> list[bytes | None]:
        return self._made

    def logits(self) -> Tensor:
        return self._logits


class TorchPlaces:
    """`Places` in plain PyTorch, on any device."""

    is_async = False

    def __init__(self, model: SparseTransformer, count: int, exact: bool = False) -> None:
        self.count = count
        self.model, self.config = in_float32(model), model.config
        self.device = next(model.parameters()).device
        self.runs_ahead = self.device.type == "cuda"
        self.reads_together = self.runs_ahead and not exact
        self.cache = make_cache(model, count, model.config.context)
        self.scale = 1 / sqrt(model.config.qk_width // model.config.heads)
        self.rows = [tuple(x.flatten(0, 1) for x in pair) for pair in self.cache.rows]
        """Keys and values of each block, [places * heads * slots, d]."""
        start, nothing = self.model.embedding.start.detach()[None], torch.zeros(1, model.config.width, device=self.device)
        self.tables = torch.cat([byte_tables(self.model), start, nothing])
        self.threads = 1 if self.config.width * self.config.ff_width < SINGLE_THREAD_PRODUCTS else None
        self.streams: dict[int, _Stream] = {}
        self.suspects: set[int] = set()
        """Places whose keys and values may not be finite. Others read slots of streams before them, with weight 0."""
        self.products = Products(self.model)
        self.networks: OrderedDict[int, NetworkPosition] = OrderedDict()
        self.windows: OrderedDict[int, _Window] = OrderedDict()

    def mark(self) -> Mark:
        return set_mark(self.device)

    def most_steps(self, streams: int) -> int:
        return 1

    @torch.inference_mode()
    def join(self, arrivals: Sequence[Arrival]) -> Generator[int, None, list[Tensor | None]]:
        self.suspects.update(arrival.place for arrival in arrivals if arrival.prompt)
        parts = read_prompts(self.model, self.cache, arrivals, self.reads_together)
        while True:
            try:
                with cpu_threads(self.threads):
                    positions = next(parts)
            except StopIteration as end:
                hidden: list[Tensor | None] = end.value
                break
            yield positions
        finite = [output.isfinite().all() for output in hidden if output is not None]
        for arrival, is_finite in zip(arrivals, torch.stack(finite).tolist() if finite else ()):
            if is_finite:
                self.suspects.discard(arrival.place)
        for place, prompt, state, params in arrivals:
            self.streams[place] = _Stream(prompt, state, params)
        return hidden

    @torch.inference_mode()
    def copy(self, source: int, place: int, state: int, params: SamplingParams) -> None:
        prompt = bytes(self.streams[source].data)
        if prompt:
            self.cache.copy(source, place, len(prompt))
        if source in self.suspects:
            self.suspects.add(place)
        self.streams[place] = _Stream(prompt, state, params)

    @torch.inference_mode()
    def leave(self, place: int) -> None:
        self.streams.pop(place, None)
        if place in self.suspects:
            self.suspects.remove(place)
            for cached in (*self.cache.keys, *self.cache.values):
                cached[place].zero_()

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(hidden[None])[0]

    @torch.inference_mode()
    def extend(self, places: Sequence[int], steps: int, keeps_logits: bool = False) -> TorchTurn:
        assert steps == 1
        assert list(places) == sorted(set(places))
        streams = [self.streams[place] for place in places]
        positions = [len(stream.data) for stream in streams]
        with cpu_threads(self.threads):
            logits = self._step(places, streams, positions)
            made = self._draw(logits, streams, positions)
        finite = logits.isfinite().all(1).tolist()
        for place, stream, byte, is_finite in zip(places, streams, made, finite):
            stream.data.append(byte)
            if not is_finite:
                self.suspects.add(place)
        return TorchTurn([bytes([byte]) if is_finite else None for byte, is_finite in zip(made, finite)], logits)

    def _step(self, places: Sequence[int], streams: Sequence[_Stream], positions: Sequence[int]) -> Tensor:
        windows = [self._window(position) for position in positions]
        learned = torch.stack([window.learned[at % WINDOW] for window, at in zip(windows, positions)])
        rotation = None
        if windows[0].rotations[0] is not None:
            pairs = [window.rotations[at % WINDOW] for window, at in zip(windows, positions)]
            cos, sin = (torch.stack(half)[:, None] for half in zip(*pairs))
            rotation = cos, sin
        readings = [
            self._reading(entry, places, [window.entries[entry][at % WINDOW] for window, at in zip(windows, positions)])
            for entry in range(len(windows[0].entries))
        ]
        attends = [
            partial(self._attend, layer, readings[layer % len(readings)]) for layer in range(self.config.layers)
        ]  # fmt: skip
        network = self._network(len(streams))
        return network.advance(self._embed(streams), learned, rotation, attends)

    def _network(self, batch: int) -> NetworkPosition:
        if batch not in self.networks:
            rows = batch if self.products.least_rows == 1 else (batch // ROWS + 1) * ROWS
            self.networks[batch] = NetworkPosition(self.model, batch, rows, self.products)
            if len(self.networks) > MOST_NETWORKS:
                self.networks.popitem(last=False)
        self.networks.move_to_end(batch)
        return self.networks[batch]

    def _embed(self, streams: Sequence[_Stream]) -> Tensor:
        """Returns the embeddings of the bytes before the next one, [streams, width]; the start vector if there is none."""
        count = self.config.last_bytes
        start, nothing = count * BYTES, count * BYTES + 1
        rows = []
        for stream in streams:
            last = stream.data[-count:]
            found = [(len(last) - 1 - index) * BYTES + byte for index, byte in enumerate(last)] or [start]
            rows.append([nothing] * (count - len(found)) + found)
        embedded = F.embedding(torch.tensor(rows, device=self.device), self.tables)  # [streams, last_bytes, width]
        return embedded.sum(1) if count > 1 else embedded[:, 0]

    def _window(self, position: int) -> _Window:
        number = position // WINDOW
        if number in self.windows:
            self.windows.move_to_end(number)
            return self.windows[number]
        ahead = range(number * WINDOW, min((number + 1) * WINDOW, self.config.context))
        entries = range(min(len(self.config.cycle), self.config.layers))
        made = _Window(
            *position_tables(self.model, ahead),
            [views(self.cache.heads[entry], self.cache.slots[entry], ahead, 1, self.device) for entry in entries],
        )
        self.windows[number] = made
        while sum(window.bytes for window in self.windows.values()) > WINDOW_BYTES and len(self.windows) > 1:
            self.windows.popitem(last=False)
        return made

    def _reading(self, entry: int, places: Sequence[int], seen: Sequence[View]) -> _Reading:
        heads = self.config.heads
        each = heads * self.cache.slots[entry]
        own = torch.cat([view.own + place * each for place, view in zip(places, seen)])
        keeping = None
        if any(view.keeping is not None for view in seen):
            every = torch.arange(heads, device=self.device)
            kept = (every if view.keeping is None else view.keeping for view in seen)
            keeping = torch.cat([index + row * heads for row, index in enumerate(kept)])
        ends = [
            at + 1 for at in range(len(seen)) if at + 1 == len(seen) or not _joins(seen[at : at + 2], places[at : at + 2])
        ]
        return _Reading(own, keeping, [self._run(each, places, seen, *pair) for pair in zip([0, *ends], ends)])

    def _run(self, each: int, places: Sequence[int], seen: Sequence[View], first: int, end: int) -> _Run:
        """Returns the run of the streams from `first` on. each: slots of a place."""
        heads, run = self.config.heads, seen[first:end]
        lists = [view.listed + each * place for view, place in zip(run, places[first:end]) if view.listed is not None]
        blind = None
        if any(view.blind is not None for view in run):
            sees = torch.zeros(heads, 1, 1, dtype=torch.bool, device=self.device)
            blind = torch.cat([sees if view.blind is None else view.blind for view in run])
        return _Run(
            slice(first * heads, end * heads), slice(places[first] * heads, (places[end - 1] + 1) * heads),
            torch.cat([view.bias for view in run]), torch.cat(lists) if lists else None, blind,
        )  # fmt: skip

    def _attend(self, layer: int, reading: _Reading, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        keys, values = self.rows[layer]
        for cached, new in ((keys, k), (values, v)):
            kept = new.flatten(0, 1)
            kept = kept if reading.keeping is None else kept.index_select(0, reading.keeping)
            cached.index_copy_(0, reading.own, kept.to(cached.dtype))
        for run in reading.runs:
            weights = torch.baddbmm(run.bias, q[run.rows], self._read(layer, 0, run).mT, alpha=self.scale).softmax(-1)
            if run.blind is not None:
                weights = weights.masked_fill(run.blind, 0)
            torch.bmm(weights, self._read(layer, 1, run).to(weights.dtype), out=out[run.rows])

    def _read(self, layer: int, which: int, run: _Run) -> Tensor:
        """Returns the keys (0) or values (1) that a run reads, [heads, most, d]."""
        cached, most = self.rows[layer][which], run.bias.shape[2]
        if run.listed is not None:
            return cached.index_select(0, run.listed).view(run.bias.shape[0], most, -1)
        return cached.view(self.count * self.config.heads, -1, cached.shape[1])[run.places, :most]

    def _draw(self, logits: Tensor, streams: Sequence[_Stream], positions: Sequence[int]) -> list[int]:
        """Draws a byte for each stream, together for those with the same parameters."""
        states = torch.tensor([stream.state for stream in streams], device=self.device)
        numbers = uniform(states, torch.tensor(positions, device=self.device))
        rows: dict[SamplingParams, list[int]] = {}
        for row, stream in enumerate(streams):
            rows.setdefault(stream.params, []).append(row)
        made = [0] * len(streams)
        for params, same in rows.items():
            chosen = slice(None) if len(rows) == 1 else torch.tensor(same, device=self.device)
            for row, byte in zip(same, pick_bytes(probabilities(logits[chosen], params), numbers[chosen]).tolist()):
                made[row] = byte
        return made


def _joins(seen: Sequence[View], places: Sequence[int]) -> bool:
    """Whether two streams, one after the other, read in one run."""
    one, two = seen
    if one.bias.shape != two.bias.shape or (one.listed is None) != (two.listed is None):
        return False
    return one.listed is not None or places[0] + 1 == places[1]
