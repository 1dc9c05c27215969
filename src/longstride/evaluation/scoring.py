"""Bits per byte, with every byte scored exactly once: of streams by minimum context, of items each by itself.

A stream is scored in windows as long as the model's context n. The first scores all its bytes. Each window after it begins
n - min_context bytes later and scores its new bytes, which so have at least min_context bytes before them. The last one ends
where the data does, and scores what is left.
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
Progress = Callable[[float, int, float], None]
"""Is told after every pass what share of this process's work is done, and how many bytes and nats that gave."""
TOGETHER = 2**16
"""Bytes of the windows that are computed at a time, unless a batch is given; at least one window."""


class Window(NamedTuple):
    """The model sees bytes start to end, and those from `first` on are scored."""

    start: int
    end: int
    first: int


class Processes(Protocol):
    """Several that share the work. All must call, with the same arguments; all get the same result."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    def gather(self, x: Tensor) -> Tensor:
        """[count, ...], by rank."""


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    count: int = 1

    def gather(self, x: Tensor) -> Tensor:
        return x[None]


@dataclass(frozen=True)
class Score:
    bits_per_byte: float
    """nats / bytes / log(2); of images the same as bits per dim."""
    nats: float
    """-log p of all bytes together."""
    bytes: int
    min_context: int
    windows: int
    seconds: float


ALONE = Alone()


def bits_per_byte(
    model: SparseTransformer,
    data: Bytes | Tensor | bytes,
    *,
    min_context: int = 0,
    batch: int | None = None,
    ranks: Processes = ALONE,
    progress: Progress | None = None,
) -> Score:
    """What the model needs for a byte of `data`, uint8: [bytes] is a stream, [items, ...] are items, each from nothing.

    It is computed where the model lies, without dropout. `batch`: windows at a time; it changes nothing but rounding.
    """
    begun = perf_counter()
    found = _array(data)
    items = found.ndim > 1
    sizes = model.config.positions.sizes
    shapes = [sizes, (model.config.context,)] + ([sizes[:2]] if sizes[-1] == 1 else [])
    if items and len(sizes) == 3 and found.shape[1:] not in shapes:
        raise ValueError(
            f"bits_per_byte: data must be [images, {', '.join(map(str, sizes))}] for this model, got {list(found.shape)}; "
            "one image alone is image[None]"
        )
    length = found[0].size if items else model.config.context
    if length > model.config.context:
        raise ValueError(
            f"bits_per_byte: data has items of {length:,} bytes, and the model's context is {model.config.context:,}"
        )
    min_context = check_min_context("bits_per_byte", min_context, model.config.context, items)
    batch = max(1, TOGETHER // length) if batch is None else whole_number("bits_per_byte", "batch", batch, 1)
    flat = found.reshape(-1)
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
    """The windows of a stream. Together they score each of its bytes once."""
    windows = [Window(0, min(context, length), 0)]
    while (first := windows[-1].end) < length:
        end = min(first + context - min_context, length)
        windows.append(Window(end - context, end, first))
    return windows


@torch.no_grad()
def score(
    model: SparseTransformer, data: Bytes, windows: Sequence[Window], batch: int, ranks: Processes = ALONE,
    progress: Progress | None = None,
) -> list[float]:  # fmt: skip
    """The nats of what each window scores, in their order. The windows must be of one length.

    Each process takes every count-th window. All do as many passes of one shape, as a spread model needs: what is too much
    is computed and left out.
    """
    rounds = -(-len(windows) // ranks.count)
    passes = -(-rounds // batch)
    size = -(-rounds // passes)
    own = [windows[min(turn * ranks.count + ranks.rank, len(windows) - 1)] for turn in range(passes * size)]
    kept = len(range(ranks.rank, len(windows), ranks.count))
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    sums: list[float] = []
    scored, total = 0, 0.0
    try:
        for done in range(1, passes + 1):
            some = own[(done - 1) * size : done * size]
            tokens = torch.from_numpy(np.stack([data[window.start : window.end] for window in some])).to(device)
            nats = model.nats(tokens).cpu().double().numpy()
            # Each sum by itself, of an array of its own: the same bits whatever else is in the batch.
            sums += [float(row[window.first - window.start :].sum()) for row, window in zip(nats, some)]
            if progress is not None:
                fresh = range((done - 1) * size, min(done * size, kept))
                scored += sum(own[turn].end - own[turn].first for turn in fresh)
                total += sum(sums[turn] for turn in fresh)
                progress(done / passes, scored, total)
    finally:
        model.train(training)
    found: list[float] = ranks.gather(torch.tensor(sums, dtype=torch.float64)).T.flatten()[: len(windows)].tolist()
    return found


def check_min_context(owner: str, min_context: object, context: int, items: bool) -> int:
    found = whole_number(owner, "min_context", min_context, 0)
    if found >= context:
        raise ValueError(
            f"{owner}: min_context must be less than the model's context = {context:,}, got {found:,}: "
            "a window must have at least one new byte"
        )
    if found and items:
        raise ValueError(f"{owner}: min_context is for streams, got {found:,} with items: each of them begins from nothing")
    return found


def _array(data: Any) -> Bytes:
    """The bytes as they lie, without a copy where that can be."""
    found = data.cpu().numpy() if isinstance(data, Tensor) else data
    found = np.frombuffer(found, np.uint8) if isinstance(found, bytes | bytearray | memoryview) else found
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(data).__name__
        raise ValueError(f"bits_per_byte: data must be bytes, or an array or tensor of uint8, got {what}")
    if found.size == 0 or found.ndim == 0:
        raise ValueError(f"bits_per_byte: data must have at least one byte, in [bytes] or [items, ...], got {found.shape}")
    return found
