"""generate(): bytes from a network, as they come.

for new in generate(model, [b"The ", b"Once upon a time"], length=200):
    print(new)                       # for each prompt the bytes that have come since: one, some, or none
"""

import operator
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longstride.common.checks import whole_number
from longstride.model import ModelConfig, SparseTransformer
from longstride.sampling.choose import Choice, stream_state
from longstride.sampling.streams import Streams, open_streams, piece_size


def generate(
    model: SparseTransformer, prompts: Sequence[bytes], length: int | None = None, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, first: int = 0,
) -> Iterator[list[bytes]]:  # fmt: skip
    """Continues each prompt, which may be empty, by `length` bytes, or as far as the context goes.

    temperature: below 1 likely bytes become likelier; 1 is what the network has learned.
    top_k, top_p: only the k most likely bytes; only the fewest that together have the probability p.
    seed, first: a sample is a function of the seed and its number, whatever else is made beside it; `first` is the number
        of the first prompt's.

    A length beyond the context slides the window: when the context is full, its last half is read again as the prompt of
    the next window, and what came before is forgotten. A model of images has no further window, and refuses that.

    Shorter prompts begin to be continued earlier, and end earlier.
    """
    choice = Choice(temperature, top_k, top_p)
    seed, first = _seed(seed), whole_number("generate", "first", first, 0)
    prompts = [_checked(number, prompt) for number, prompt in enumerate(prompts)]
    ends = [_end(number, prompt, length, model.config) for number, prompt in enumerate(prompts)]
    return _windows(model, prompts, ends, choice, seed, first)


def kept(context: int) -> int:
    """Bytes of a full window that the next one begins with."""
    return context // 2


def _windows(
    model: SparseTransformer, prompts: list[bytes], ends: list[int], choice: Choice, seed: int, first: int
) -> Iterator[list[bytes]]:  # fmt: skip
    """One window for all samples; those that go on have a full context, so that the next one is the same for all of them.

    A byte's random number is that of its position in the whole sample, whichever window it is made in.
    """
    context, start = model.config.context, 0
    device = next(model.parameters()).device
    window = {number: bytearray(prompt) for number, prompt in enumerate(prompts)}
    while window:
        numbers = list(window)
        state = stream_state(seed, first + torch.tensor(numbers, device=device)) + start
        given, here = [bytes(window[number]) for number in numbers], [min(ends[n] - start, context) for n in numbers]
        for new in _generate(model, given, here, choice, state):
            pieces = dict(zip(numbers, new))
            for number, piece in pieces.items():
                window[number] += piece
            yield [pieces.get(number, b"") for number in range(len(prompts))]
        window = {n: window[n][context - kept(context) :] for n in numbers if ends[n] - start > context}
        start += context - kept(context)


def _generate(
    model: SparseTransformer, prompts: list[bytes], ends: list[int], choice: Choice, state: Tensor
) -> Iterator[list[bytes]]:  # fmt: skip
    streams = open_streams(model, len(prompts), max(ends))
    device = streams.tokens.device
    shared = min(map(len, prompts))
    for row, prompt in zip(streams.tokens, prompts):
        if prompt:
            row[: len(prompt)] = torch.frombuffer(bytearray(prompt), dtype=torch.uint8)
    streams.prefill(streams.tokens[:, :shared].clone())
    # Who has a longer prompt is given its bytes, while the others' are made.
    known = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
    size = piece_size(device)
    # Of one generator all pieces are made on one stream of the GPU, whichever is current when the next is asked for.
    queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
    waiting: deque[_Piece] = deque()
    for here in range(shared, max(ends), size):
        with torch.cuda.stream(queue):
            waiting.append(_Piece(streams, min(size, max(ends) - here), known, state, choice))
        # One is being made while the one before it is handed out.
        if len(waiting) > streams.returns_early:
            yield waiting.popleft().of_each(prompts, ends, model.config.precision)
    while waiting:
        yield waiting.popleft().of_each(prompts, ends, model.config.precision)


class _Piece:
    """Some bytes of all streams, which a GPU may still be making."""

    def __init__(self, streams: Streams, steps: int, known: Tensor, state: Tensor, choice: Choice) -> None:
        self.first, self.last = streams.position, streams.position + steps - 1
        made = streams.make(steps, known, state, choice)
        self.made = made.to("cpu", non_blocking=True)
        self.finite = streams.logits.isfinite().all().to("cpu", non_blocking=True)
        self.there = torch.cuda.current_stream(made.device).record_event() if made.is_cuda else None

    def of_each(self, prompts: Sequence[bytes], ends: Sequence[int], precision: str) -> list[bytes]:
        """Without what was given, and without what is past a stream's end."""
        if self.there is not None:
            self.there.synchronize()
        if not self.finite:
            raise ValueError(
                f"generate: the logits are not finite, at position {self.last:,} at the latest: the model's weights are "
                f"not, or are too large for precision = {precision}"
            )
        return [
            row[max(0, len(prompt) - self.first) : max(0, end - self.first)].tobytes()
            for row, prompt, end in zip(self.made.numpy(), prompts, ends)
        ]  # fmt: skip


def _seed(seed: object) -> int:
    try:
        found = operator.index(seed)  # type: ignore[arg-type]
        if -(2**63) <= found < 2**64:
            return found
    except TypeError:
        pass
    raise ValueError(f"generate: seed must be a whole number of 64 bits, got {seed!r}")


def _checked(number: int, prompt: object) -> bytes:
    if not isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError(f"generate: prompts must be a list of bytes; prompt {number} is {prompt!r}")
    return bytes(prompt)


def _end(number: int, prompt: bytes, length: int | None, config: ModelConfig) -> int:
    """Where a sample ends."""
    context = config.context
    if len(prompt) >= context:
        raise ValueError(
            f"generate: prompt {number} has {len(prompt):,} bytes, and the context is {context:,}: "
            f"give at most {context - 1:,}"
        )
    if length is None:
        return context
    end = len(prompt) + whole_number("generate", "length", length, 1)
    if end > context and len(config.positions.sizes) == 3:
        raise ValueError(
            f"generate: length = {length:,} after a prompt of {len(prompt):,} bytes is more than an image, which has "
            f"{context:,}; give at most {context - len(prompt):,}"
        )
    return end
