"""Prompts of samples: text from the command line, a file, the upper part of images, the start of a sound."""

from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

from longstride.data.kind import DataKind, Prompt
from longstride.data.kinds import all_kinds
from longstride.data.plan import data_suffix
from longstride.data.prepare import ANYTHING
from longstride.sampling.request import OWNER, Request


@dataclass(frozen=True)
class Prompts:
    prompts: list[bytes]
    """One per sample."""
    length: int | None
    """Bytes to generate after each prompt; None: up to the context."""
    originals: list[bytes]
    """The images to complete; each has the same number of samples."""


def read_prompts(request: Request, kind: DataKind, context: int) -> Prompts:
    """Returns the prompts of a request; ValueError if they do not fit the model."""
    _check_request(request, kind)
    if request.prompt_file is None:
        # The bytes as they were typed, also if they are no UTF-8.
        given = [Prompt((request.prompt or "").encode("utf-8", "surrogateescape"))]
    else:
        _check_kind_of_file(request.prompt_file, kind)
        options = {name: getattr(request, name) for name in kind.prompt_options}
        given = kind.read_prompts(OWNER, request.prompt_file, context, options)
    prompts = [prompt.data for prompt in given for _ in range(request.count)]
    if kind.item:
        return Prompts(prompts, prod(kind.item) - len(prompts[0]), [prompt.original for prompt in given if prompt.original])
    for prompt in given:
        if len(prompt.data) >= context:
            argument, size = "prompt", f"{len(prompt.data):,} bytes"
            if request.prompt_file is not None:
                argument, size = f"prompt_file = {str(request.prompt_file)!r}", f"{len(prompt.data):,} bytes or more"
            raise ValueError(f"{OWNER}: {argument} has {size}, and the context is {context:,}; give at most {context - 1:,}")
    length = request.length
    if length is None and kind.default_length is not None:
        length = max(1, min(kind.default_length, context - max(map(len, prompts))))
    return Prompts(prompts, length, [])


def _check_kind_of_file(path: Path, kind: DataKind) -> None:
    """Refuses a file whose name says that it is of another kind. Any file is bytes."""
    suffix = data_suffix(path)
    for other in all_kinds():
        if suffix in other.suffixes and other.name != kind.name != ANYTHING:
            as_bytes = "" if kind.has_items else f", or --kind {ANYTHING} to take the file's bytes as they are"
            raise ValueError(
                f"{OWNER}: prompt_file = {str(path)!r} is a file of {other.label}, and the model makes {kind.name}; give "
                f"one of {kind.label}{as_bytes}"
            )


def _check_request(request: Request, kind: DataKind) -> None:
    """Refuses options that are for other kinds of data."""
    if request.prompt is not None and kind.prompt_example is not None:
        raise ValueError(
            f"{OWNER}: prompt = {request.prompt!r} is text, and the model makes {kind.name}; give {kind.prompt_example}"
        )
    if request.length is not None and kind.item:
        raise ValueError(f"{OWNER}: length = {request.length} is not for {kind.name}, which are made whole; leave it out")
    defaults = {field.name: field.default for field in fields(Request)}
    for other in all_kinds():
        for name in (*other.output_options, *other.prompt_options):
            value = getattr(request, name)
            if value == defaults[name]:
                continue
            if name not in (*kind.output_options, *kind.prompt_options):
                raise ValueError(
                    f"{OWNER}: {name} = {value} is for {other.name}, and the model makes {kind.name}; leave it out"
                )
            if name in kind.prompt_options and request.prompt_file is None:
                raise ValueError(f"{OWNER}: {name} = {value} says what is kept of --prompt-file; give that, too")
