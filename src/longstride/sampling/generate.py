"""generate(): bytes from a network, as they come.

for new in generate(model, [b"The ", b"Once upon a time"], length=200):
    print(new)                       # for each prompt the bytes that have come since: one, some, or none
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longstride.checks import whole_number
from longstride.model import SparseTransformer
from longstride.sampling.choose import pick, probabilities, uniform
from longstride.sampling.decoder import Decoder


def generate(
    model: SparseTransformer, prompts: Sequence[bytes], length: int | None = None, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, first: int = 0,
) -> Iterator[list[bytes]]:  # fmt: skip
    """Continues each prompt, which may be empty, by `length` bytes, or as far as the context goes.

    temperature: below 1 likely bytes become likelier; 1 is what the network has learned.
    top_k, top_p: only the k most likely bytes; only the fewest that together have the probability p.
    seed, first: a sample is a function of the seed and its number, whatever else is made beside it; `first` is the number
        of the first prompt's.

    Shorter prompts begin to be continued earlier, and end earlier.
    """
    check_settings(temperature, top_k, top_p)
    prompts = [bytes(prompt) for prompt in prompts]
    context = model.config.context
    ends = [_end(number, prompt, length, context) for number, prompt in enumerate(prompts)]
    return _generate(model, prompts, ends, temperature, top_k, top_p, seed, first)


def _generate(
    model: SparseTransformer, prompts: list[bytes], ends: list[int], temperature: float, top_k: int | None,
    top_p: float | None, seed: int, first: int,
) -> Iterator[list[bytes]]:  # fmt: skip
    if not prompts:
        return
    shared = min(map(len, prompts))
    decoder = Decoder(model, len(prompts), max(ends))
    known = torch.tensor([list(prompt[:shared]) for prompt in prompts], dtype=torch.uint8, device=decoder.device)
    decoder.prefill(known.view(len(prompts), shared))
    previous: Tensor | None = known[:, -1] if shared else None
    samples = torch.arange(first, first + len(prompts), device=decoder.device)
    for position in range(shared, max(ends)):
        logits = decoder.step(previous)
        chosen = pick(probabilities(logits, temperature, top_k, top_p), uniform(seed, samples, position))
        bytes_here = chosen.tolist()
        given = [prompt[position] if position < len(prompt) else None for prompt in prompts]
        if any(byte is not None for byte in given):
            bytes_here = [new if old is None else old for new, old in zip(bytes_here, given)]
            chosen = torch.tensor(bytes_here, dtype=torch.uint8, device=decoder.device)
        yield [
            bytes([byte]) if len(prompt) <= position < end else b"" for byte, prompt, end in zip(bytes_here, prompts, ends)
        ]
        previous = chosen


def check_settings(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(
            f"generate: temperature must be above 0, got {temperature}; top_k = 1 takes the most likely byte each time"
        )
    if top_k is not None:
        whole_number("generate", "top_k", top_k, 1)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must be above 0 and at most 1, got {top_p}")


def _end(number: int, prompt: bytes, length: int | None, context: int) -> int:
    """Where a sample ends."""
    if len(prompt) >= context:
        raise ValueError(
            f"generate: prompt {number} has {len(prompt):,} bytes, and the context is {context:,}: "
            f"give at most {context - 1:,}"
        )
    if length is None:
        return context
    end = len(prompt) + whole_number("generate", "length", length, 1)
    if end > context:
        raise ValueError(
            f"generate: length = {length:,} after a prompt of {len(prompt):,} bytes is more than the context of "
            f"{context:,}; give at most {context - len(prompt):,}"
        )
    return end
