"""Samples text, images or sound from a run or a saved model, with or without a prompt.

longstride sample RUN --prompt 'The history of ' --temperature 0.8
longstride sample RUN --count 16
longstride sample RUN --prompt-file image.png --keep-top 0.5
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longstride.common.console import Progress, StandardError, print_line, with_noun
from longstride.common.device import choose_device
from longstride.data.plan import list_names
from longstride.model import SparseTransformer
from longstride.sampling import generate
from longstride.sampling.data_kind import find_data_kind
from longstride.sampling.generation import window_overlap
from longstride.sampling.outputs import StandardOutput, plan_output
from longstride.sampling.prompts import Prompts, read_prompts
from longstride.sampling.request import OWNER, Request
from longstride.training.source import open_source

TOGETHER = 65_536
"""Bytes of the samples in a batch, unless --batch is given."""


def sample(folder: Path, request: Request) -> list[bytes]:
    """Generates samples, prints or writes them, and returns them with their prompts. `longstride sample --help` has more.

    Ctrl-C writes what is complete so far: partial texts and sounds, and whole images.
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
    prompts = read_prompts(request, kind, model.config.context)
    _check(model, prompts, request)
    device = choose_device(OWNER, request.device)
    output = plan_output(request, source, kind, len(prompts.prompts))
    model = model.to(device)

    made = [bytearray(prompt) for prompt in prompts.prompts]
    ends = [model.config.context if prompts.length is None else len(prompt) + prompts.length for prompt in prompts.prompts]
    stream = None if output is not None else StandardOutput()
    total = sum(ends) - sum(map(len, prompts.prompts))
    interrupted = False
    console = StandardError()
    if max(ends) > model.config.context:
        print_line(console, _sliding(max(ends), model.config.context))
    with Progress(total, console, shown=stream is None or (stream.file and console.is_terminal)) as progress:
        try:
            if stream is not None:
                stream.write(prompts.prompts[0])
            for first, new in _batches(model, prompts, request):
                for number, piece in enumerate(new, first):
                    made[number] += piece
                if stream is not None:
                    stream.write(new[0])
                    if not stream.open:
                        break
                progress.advance(sum(map(len, new)))
        except KeyboardInterrupt:
            interrupted = True
    if stream is not None:
        stream.close()
        if stream.precedes_stderr:
            console.print()
        print_line(console, progress.summary())
    samples = [bytes(sample) for sample in made]
    if interrupted:
        begun = [len(sample) > len(prompt) for sample, prompt in zip(samples, prompts.prompts)]
        whole = [len(sample) == end for sample, end in zip(samples, ends)]
        samples = [sample for sample, keep in zip(samples, whole if kind.item else begun) if keep]
    if output is not None and samples:
        output.write(samples, prompts.prompts, prompts.originals)
        of = f" of {len(made):,}" if len(samples) < len(made) else ""
        print(f"wrote {output.location}: {len(samples):,}{of} {kind.nouns[len(made) != 1]}, {progress.summary()}")
        if others := output.others(len(samples)):
            names = list_names(output.location, others)
            print_line(
                console, f"{output.location} also has {with_noun(len(others), 'file')} that this call did not write: {names}"
            )
    if interrupted:
        raise KeyboardInterrupt
    if stream is not None and stream.reader_closed:
        raise BrokenPipeError
    return samples


def _batches(model: SparseTransformer, prompts: Prompts, request: Request) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the number of the batch's first sample, and the new bytes of each sample in the batch."""
    longest = max(map(len, prompts.prompts)) + prompts.length if prompts.length else model.config.context
    longest = min(longest, model.config.context)
    size = request.batch or max(1, TOGETHER // longest)
    for first in range(0, len(prompts.prompts), size):
        with _errors_of_sample():
            for new in _generate(model, prompts.prompts[first : first + size], prompts.length, request, first):
                yield first, new


def _generate(
    model: SparseTransformer, prompts: list[bytes], length: int | None, request: Request, first: int
) -> Iterator[list[bytes]]:  # fmt: skip
    return generate(
        model, prompts, length, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p,
        seed=request.seed, first=first,
    )  # fmt: skip


def _check(model: SparseTransformer, prompts: Prompts, request: Request) -> None:
    """Raises the errors of `generate` before anything is sampled or printed."""
    with _errors_of_sample():
        _generate(model, prompts.prompts[:1], prompts.length, request, 0)


@contextmanager
def _errors_of_sample() -> Iterator[None]:
    """Errors of `generate` name the command instead."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{OWNER}: {str(error).removeprefix('generate: ')}") from None


def _sliding(end: int, context: int) -> str:
    return (
        f"{end:,} bytes are more than the context of {context:,}: the window slides, and each further one begins with the "
        f"last {window_overlap(context):,} bytes of the one before"
    )
