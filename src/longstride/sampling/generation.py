"""generate(): samples bytes from a model and yields them as they are generated.

for new in generate(model, [b"The ", b"Once upon a time"], length=200):
    print(new)                       # new bytes for each prompt; some may have none
"""

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from longstride.common.checks import short_repr, whole_number
from longstride.model import ModelConfig, SparseTransformer
from longstride.sampling.params import SamplingParams
from longstride.sampling.sampler import random_state
from longstride.sampling.streams import Streams, open_streams, piece_size


def generate(
    model: SparseTransformer, prompts: Sequence[bytes], length: int | None = None, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, first: int = 0,
) -> Iterator[list[bytes]]:  # fmt: skip
    """Continues each prompt, which may be empty, by `length` bytes; by default up to the end of the context.

    Yields lists with the new bytes of each prompt, until all are done: b"" for one that has not begun or has ended.

    temperature: divides the logits; below 1 likely bytes become likelier, 1 leaves the distribution unchanged.
    top_k, top_p: draw only from the k most likely bytes; only from the smallest set of bytes with total probability p.
    seed, first: a sample depends only on the seed and its index, not on the batch. `first`: index of the first prompt.

    Beyond the context the window slides: when the context is full, its last half becomes the prompt of the next window, and
    earlier bytes are forgotten. Models of images refuse that.

    All samples advance together, one position at a time, so those with shorter prompts begin and end earlier.
    """
    params = SamplingParams(temperature, top_k, top_p)
    seed, first = _check_seed(seed), whole_number("generate", "first", first, 0)
    if isinstance(prompts, str | bytes | bytearray):
        raise ValueError(f"generate: prompts must be a list of bytes, got {short_repr(prompts)}; put it into a list")
    prompts = [_check_prompt(index, prompt) for index, prompt in enumerate(prompts)]
    ends = [_sample_end(index, prompt, length, model.config) for index, prompt in enumerate(prompts)]
    return _generate_windows(model, prompts, ends, params, seed, first)


def window_overlap(context: int) -> int:
    """Returns how many bytes of a full window the next one begins with."""
    return context // 2


def _generate_windows(
    model: SparseTransformer, prompts: list[bytes], ends: list[int], params: SamplingParams, seed: int, first: int
) -> Iterator[list[bytes]]:  # fmt: skip
    """Generates one window after the other. Samples that go on have all filled the context, so they share the next window.

    A byte's random number depends on its position in the whole sample, not in the window.
    """
    context, start = model.config.context, 0
    device = next(model.parameters()).device
    window = {index: bytearray(prompt) for index, prompt in enumerate(prompts)}
    while window:
        indices = list(window)
        state = random_state(seed, first + torch.tensor(indices, device=device)) + start
        given, here = [bytes(window[index]) for index in indices], [min(ends[n] - start, context) for n in indices]
        for new in _generate_window(model, given, here, params, state):
            pieces = dict(zip(indices, new))
            for index, piece in pieces.items():
                window[index] += piece
            yield [pieces.get(index, b"") for index in range(len(prompts))]
        window = {n: window[n][context - window_overlap(context) :] for n in indices if ends[n] - start > context}
        start += context - window_overlap(context)


def _generate_window(
    model: SparseTransformer, prompts: list[bytes], ends: list[int], params: SamplingParams, state: Tensor
) -> Iterator[list[bytes]]:  # fmt: skip
    streams = open_streams(model, len(prompts), max(ends))
    device = streams.tokens.device
    shared = min(map(len, prompts))
    for row, prompt in zip(streams.tokens, prompts):
        if prompt:
            row[: len(prompt)] = torch.frombuffer(bytearray(prompt), dtype=torch.uint8)
    streams.prefill(streams.tokens[:, :shared].clone())
    # Streams with longer prompts take their bytes from the prompt while the others are sampled.
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
    size = piece_size(device)
    # One generator uses one CUDA stream, even if another one is current when the next piece is requested.
    queue = torch.cuda.current_stream(device) if device.type == "cuda" else None
    waiting: deque[_Piece] = deque()
    for here in range(shared, max(ends), size):
        with nullcontext() if queue is None else torch.cuda.stream(queue):
            waiting.append(_Piece(streams, min(size, max(ends) - here), prompt_lengths, state, params))
        # The GPU works on one piece while the one before it is yielded.
        if len(waiting) > streams.is_async:
            yield waiting.popleft().new_bytes(prompts, ends, model.config.precision)
    while waiting:
        yield waiting.popleft().new_bytes(prompts, ends, model.config.precision)


class _Piece:
    """Some bytes of all streams, which the GPU may still be computing."""

    def __init__(self, streams: Streams, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> None:
        self.first, self.last = streams.position, streams.position + steps - 1
        tokens = streams.extend(steps, prompt_lengths, state, params)
        self.tokens = tokens.to("cpu", non_blocking=True)
        self.finite = streams.logits.isfinite().all().to("cpu", non_blocking=True)
        self.ready = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None

    def new_bytes(self, prompts: Sequence[bytes], ends: Sequence[int], precision: str) -> list[bytes]:
        """Returns the new bytes of each stream, without its prompt and without bytes past its end."""
        if self.ready is not None:
            self.ready.synchronize()
        if not self.finite:
            raise ValueError(
                f"generate: the logits are not finite, at position {self.last:,} at the latest: the model's weights are "
                f"not, or are too large for precision = {precision}"
            )
        return [
            row[max(0, len(prompt) - self.first) : max(0, end - self.first)].tobytes()
            for row, prompt, end in zip(self.tokens.numpy(), prompts, ends)
        ]  # fmt: skip


def _check_seed(seed: object) -> int:
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
        if -(2**63) <= number < 2**64:
            return number
    except TypeError:
        pass
    raise ValueError(f"generate: seed must be a whole number of 64 bits, got {seed!r}")


def _check_prompt(index: int, prompt: object) -> bytes:
    if not isinstance(prompt, bytes | bytearray | memoryview):
        fix = ", which .encode() makes bytes" if isinstance(prompt, str) else ""
        raise ValueError(f"generate: prompts must be a list of bytes; prompt {index} is {short_repr(prompt)}{fix}")
    return bytes(prompt)


def _sample_end(index: int, prompt: bytes, length: int | None, config: ModelConfig) -> int:
    """Returns the length of a sample with its prompt; ValueError if the model cannot generate it."""
    context = config.context
    if len(prompt) >= context:
        raise ValueError(
            f"generate: prompt {index} has {len(prompt):,} bytes, and the context is {context:,}: "
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
