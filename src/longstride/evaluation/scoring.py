"""Bits per byte, with every byte scored exactly once: streams in overlapping windows, items one by one.

A stream is scored in windows as long as the model's context n. The first window scores all its bytes. Each later window
starts n - min_context bytes further on and scores its new bytes, so each has at least min_context bytes before it. The last
window ends at the end of the data and scores the remaining bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, log
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longstride.common.checks import whole_number
from longstride.model import SparseTransformer

Bytes = npt.NDArray[np.uint8]
ReportProgress = Callable[[float, int, float], None]
"""Called after every pass with this process's share of work done, and the bytes and nats scored so far."""
BYTES_PER_PASS = 2**16
"""Bytes of the windows that are computed at a time, if no batch is given; at least one window."""


class Window(NamedTuple):
    """The model reads bytes `start` to `end`; those from `first` on are scored."""

    start: int
    end: int
    first: int


class Processes(Protocol):
    """A group of processes that share the work. All must call with the same arguments, and all get the same result."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    def gather(self, x: Tensor) -> Tensor:
        """Returns the x of all processes, [count, ...], by rank."""


@dataclass(frozen=True)
class SingleProcess:
    rank: int = 0
    count: int = 1

    def gather(self, x: Tensor) -> Tensor:
        return x[None]


@dataclass(frozen=True)
class Score:
    bits_per_byte: float
    """nats / bytes / log(2); for images the same as bits per dim."""
    nats: float
    """-log p summed over all bytes."""
    bytes: int
    min_context: int
    windows: int
    seconds: float


SINGLE_PROCESS = SingleProcess()


def bits_per_byte(
    model: SparseTransformer,
    data: Bytes | Tensor | bytes,
    *,
    min_context: int = 0,
    batch: int | None = None,
    ranks: Processes = SINGLE_PROCESS,
    progress: ReportProgress | None = None,
) -> Score:
    """Scores `data`, uint8, by the model: [bytes] is a stream, [items, ...] are items, each scored without context.

    Every byte is scored once. `min_context`: the fewest bytes that the model sees before a byte of a stream, except in the
    first window. Runs on the model's device, without dropout. `batch`: windows at a time; it affects only rounding.
    """
    begun = perf_counter()
    array = _array(data)
    items = array.ndim > 1
    sizes = model.config.positions.sizes
    shapes = [sizes, (model.config.context,)] + ([sizes[:2]] if sizes[-1:] == (1,) else [])
    if items and len(sizes) == 3 and array.shape[1:] not in shapes:
        raise ValueError(
            f"bits_per_byte: data must be [images, {', '.join(map(str, sizes))}] for this model, got {list(array.shape)}; "
            "one image alone is image[None]"
        )
    length = array[0].size if items else model.config.context
    if length > model.config.context:
        raise ValueError(
            f"bits_per_byte: data has items of {length:,} bytes, and the model's context is {model.config.context:,}"
        )
    min_context = check_min_context("bits_per_byte", min_context, model.config.context, items)
    batch = max(1, BYTES_PER_PASS // length) if batch is None else whole_number("bits_per_byte", "batch", batch, 1)
    flat = array.reshape(-1)
    windows = windows_of(flat.size, length, min_context)
    sums = score(model, flat, windows, batch, ranks, progress)
    for window, nats in zip(windows, sums):
        if not isfinite(nats):
            raise FloatingPointError(
                f"bits_per_byte: bytes {window.first:,} to {window.end - 1:,} have {nats} nats; " + _remedy(model)
            )
    nats = fsum(sums)
    return Score(nats / flat.size / log(2), nats, flat.size, min_context, len(windows), perf_counter() - begun)


def _remedy(model: SparseTransformer) -> str:
    if not all(x.isfinite().all() for x in model.parameters()):
        return "the model has weights that are not finite"
    if model.config.precision == "float32":
        return "its activations are too large for float32"
    return f"the model's precision is {model.config.precision}, and float32 may do"


def windows_of(length: int, context: int, min_context: int) -> list[Window]:
    """Returns the windows of a stream. Together they score each byte once."""
    windows = [Window(0, min(context, length), 0)]
    while (first := windows[-1].end) < length:
        end = min(first + context - min_context, length)
        windows.append(Window(end - context, end, first))
    return windows


@torch.no_grad()
def score(
    model: SparseTransformer, data: Bytes, windows: Sequence[Window], batch: int, ranks: Processes = SINGLE_PROCESS,
    progress: ReportProgress | None = None,
) -> list[float]:  # fmt: skip
    """Returns the nats that each window scores, in order. The windows must have one length.

    Each process takes every count-th window. All run the same number of passes of one shape, as FSDP requires; surplus
    results are dropped.
    """
    rounds = -(-len(windows) // ranks.count)
    passes = -(-rounds // batch)
    size = -(-rounds // passes)
    own = [windows[min(turn * ranks.count + ranks.rank, len(windows) - 1)] for turn in range(passes * size)]
    own_count = len(range(ranks.rank, len(windows), ranks.count))
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    sums: list[float] = []
    scored, total = 0, 0.0
    try:
        for done in range(1, passes + 1):
            pass_windows = own[(done - 1) * size : done * size]
            tokens = torch.from_numpy(np.stack([data[window.start : window.end] for window in pass_windows])).to(device)
            nats = model.nats(tokens).cpu().double().numpy()
            # Each row is summed separately, so that the result does not depend on the rest of the batch.
            sums += [float(row[window.first - window.start :].sum()) for row, window in zip(nats, pass_windows)]
            if progress is not None:
                fresh = range((done - 1) * size, min(done * size, own_count))
                scored += sum(own[turn].end - own[turn].first for turn in fresh)
                total += sum(sums[turn] for turn in fresh)
                progress(done / passes, scored, total)
    finally:
        model.train(training)
    by_window: list[float] = ranks.gather(torch.tensor(sums, dtype=torch.float64)).T.flatten()[: len(windows)].tolist()
    return by_window


def check_min_context(owner: str, min_context: object, context: int, items: bool) -> int:
    checked = whole_number(owner, "min_context", min_context, 0)
    if checked >= context:
        raise ValueError(
            f"{owner}: min_context must be less than the model's context = {context:,}, got {checked:,}: "
            "a window must have at least one new byte"
        )
    if checked and items:
        raise ValueError(
            f"{owner}: min_context is for streams, got {checked:,} with items: each item is scored without context"
        )
    return checked


def _array(data: Any) -> Bytes:
    """Returns the data as a uint8 array, without a copy where possible."""
    array = data.cpu().numpy() if isinstance(data, Tensor) else data
    array = np.frombuffer(array, np.uint8) if isinstance(array, bytes | bytearray | memoryview) else array
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        what = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(data).__name__
        raise ValueError(f"bits_per_byte: data must be bytes, or an array or tensor of uint8, got {what}")
    if array.size == 0 or array.ndim == 0:
        raise ValueError(f"bits_per_byte: data must have at least one byte, in [bytes] or [items, ...], got {array.shape}")
    return array
