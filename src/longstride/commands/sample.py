"""Text, images or sound from a run or a saved model, from nothing or from a beginning that is given.

longstride sample RUN --prompt 'The history of ' --temperature 0.8
longstride sample RUN --count 16
longstride sample RUN --prompt-file image.png --keep-top 0.5
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longstride.common.console import StandardError
from longstride.common.device import choose_device
from longstride.model import SparseTransformer
from longstride.sampling import generate
from longstride.sampling.data_kind import find_data_kind
from longstride.sampling.generation import kept
from longstride.sampling.meter import Meter
from longstride.sampling.outputs import Stream, find_output
from longstride.sampling.prompts import Prompts, find_prompts
from longstride.sampling.request import OWNER, Request
from longstride.training.source import open_source

TOGETHER = 65_536
"""Bytes of the samples that are made together, if nothing else is said."""


def sample(folder: Path, request: Request) -> list[bytes]:
    """Makes the samples, and prints or writes them; returns them with their prompts. `longstride sample --help` has more.

    An interruption leaves what there is by then: texts and sounds as far as they have come, and whole images.
    """
    request.check()
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"{OWNER}: {processes} processes were started, and would all make and write the same; start one, without "
            "torchrun, or one for each GPU with another --seed and --out"
        )
    source = open_source(OWNER, folder, request.checkpoint)
    model = SparseTransformer.from_pretrained(source.weights)
    kind = find_data_kind(source, model.config, request.kind)
    prompts = find_prompts(request, kind, model.config.context)
    _check(model, prompts, request)
    device = choose_device(OWNER, request.device)
    output = find_output(request, source, kind, len(prompts.each))
    model = model.to(device)

    made = [bytearray(prompt) for prompt in prompts.each]
    ends = [model.config.context if prompts.length is None else len(one) + prompts.length for one in prompts.each]
    stream = None if output is not None else Stream()
    total = sum(ends) - sum(map(len, prompts.each))
    interrupted = False
    console = StandardError()
    if max(ends) > model.config.context:
        console.print(_sliding(max(ends), model.config.context), highlight=False, soft_wrap=True)
    with Meter(console, total, shown=stream is None or (stream.file and console.is_terminal)) as meter:
        try:
            if stream is not None:
                stream.write(prompts.each[0])
            for first, new in _batches(model, prompts, request):
                for number, some in enumerate(new, first):
                    made[number] += some
                if stream is not None:
                    stream.write(new[0])
                    if not stream.open:
                        break
                meter.advance(sum(map(len, new)))
        except KeyboardInterrupt:
            interrupted = True
    if stream is not None:
        stream.close()
        if stream.in_front_of_errors:
            console.print()
        console.print(meter.summary(), highlight=False, soft_wrap=True)
    there = [bytes(one) for one in made]
    if interrupted:
        begun = [len(one) > len(prompt) for one, prompt in zip(there, prompts.each)]
        whole = [len(one) == end for one, end in zip(there, ends)]
        there = [one for one, keep in zip(there, whole if kind.item else begun) if keep]
    if output is not None and there:
        output.write(there, prompts.each, prompts.originals)
        of = f" of {len(made):,}" if len(there) < len(made) else ""
        print(f"wrote {output.place}: {len(there):,}{of} {kind.nouns[len(made) != 1]}, {meter.summary()}")
    if interrupted:
        raise KeyboardInterrupt
    if stream is not None and stream.unread:
        raise BrokenPipeError
    return there


def _batches(model: SparseTransformer, prompts: Prompts, request: Request) -> Iterator[tuple[int, list[bytes]]]:
    """The number of the first sample of those that are made now, and what is new in each."""
    longest = max(map(len, prompts.each)) + prompts.length if prompts.length else model.config.context
    longest = min(longest, model.config.context)
    size = request.batch or max(1, TOGETHER // longest)
    for first in range(0, len(prompts.each), size):
        with _in_our_name():
            for new in _generate(model, prompts.each[first : first + size], prompts.length, request, first):
                yield first, new


def _generate(
    model: SparseTransformer, prompts: list[bytes], length: int | None, request: Request, first: int
) -> Iterator[list[bytes]]:  # fmt: skip
    return generate(
        model, prompts, length, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p,
        seed=request.seed, first=first,
    )  # fmt: skip


def _check(model: SparseTransformer, prompts: Prompts, request: Request) -> None:
    """What `generate` refuses, before anything is made or printed."""
    with _in_our_name():
        _generate(model, prompts.each[:1], prompts.length, request, 0)


@contextmanager
def _in_our_name() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{OWNER}: {str(error).removeprefix('generate: ')}") from None


def _sliding(end: int, context: int) -> str:
    return (
        f"{end:,} bytes are more than the context of {context:,}: the window slides, and each further one begins with the "
        f"last {kept(context):,} bytes of the one before"
    )
