"""What samples begin with: text that was typed, a file, the upper part of images, the beginning of a sound."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from longstride.common.checks import MOST
from longstride.data import audio
from longstride.data.images import open_images, shape_text
from longstride.data.store import Bytes
from longstride.sampling.request import OWNER, Request
from longstride.sampling.subject import Subject

TEXT = 500
"""Bytes of a text, if nothing else is said."""
ITEMS = 64
"""The most images that are completed without being named: a data set is more than anyone meant."""


@dataclass(frozen=True)
class Prompts:
    each: list[bytes]
    """One for each sample."""
    length: int | None
    """Bytes that are added to each; None: up to the context."""
    originals: list[bytes]
    """The images that are completed, each as many times as there are samples of one."""


def find_prompts(request: Request, subject: Subject, context: int) -> Prompts:
    _check(request, subject)
    if subject.kind == "images":
        originals = [] if request.prompt_file is None else _images(request.prompt_file, request.items, subject)
        kept = _kept(request.keep_top, subject) if originals else 0
        each = [original[:kept] for original in originals or [b""] for _ in range(request.count)]
        return Prompts(each, prod(subject.item) - kept, originals)
    if request.prompt_file is None:
        prompt = (request.prompt or "").encode("utf-8", "surrogateescape")  # As it was typed, whatever that is.
    elif request.prompt_file.is_dir():
        raise ValueError(f"{OWNER}: prompt_file = {str(request.prompt_file)!r} is a folder; give a file in it")
    elif subject.kind == "audio":
        prompt = _sound(request.prompt_file, request.seconds, subject.rate, context)
    else:
        with request.prompt_file.open("rb") as file:
            prompt = file.read(context)  # No more is of use, and a device has no end.
    if len(prompt) >= context:
        given, size = "prompt", f"{len(prompt):,} bytes"
        if request.prompt_file is not None:
            given, size = f"prompt_file = {str(request.prompt_file)!r}", f"{len(prompt):,} bytes or more"
        raise ValueError(f"{OWNER}: {given} has {size}, and the context is {context:,}; give at most {context - 1:,}")
    length = request.length
    if length is None and subject.kind == "text":
        length = max(1, min(TEXT, context - len(prompt)))
    return Prompts([prompt] * request.count, length, [])


def _check(request: Request, subject: Subject) -> None:
    if request.prompt is not None and subject.kind in ("images", "audio"):
        like = "an image, as in --prompt-file a.png" if subject.kind == "images" else "a sound, as in --prompt-file a.wav"
        raise ValueError(f"{OWNER}: prompt = {request.prompt!r} is text, and the model makes {subject.kind}; give {like}")
    if request.length is not None and subject.kind == "images":
        raise ValueError(f"{OWNER}: length = {request.length} is not for images, which are made whole; leave it out")
    if request.scale > 1 and subject.kind != "images":
        raise ValueError(f"{OWNER}: scale = {request.scale} is for images, and the model makes {subject.kind}; leave it out")
    for name, kind in (("keep_top", "images"), ("items", "images"), ("seconds", "audio")):
        value = getattr(request, name)
        if value in (None, ()):
            continue
        if subject.kind != kind:
            raise ValueError(f"{OWNER}: {name} = {value} is for {kind}, and the model makes {subject.kind}; leave it out")
        if request.prompt_file is None:
            raise ValueError(f"{OWNER}: {name} = {value} says what is kept of --prompt-file; give that, too")


def _images(path: Path, items: tuple[int, ...], subject: Subject) -> list[bytes]:
    with _named(path):
        found = open_images(path)
    wanted = subject.item
    repeat = wanted[2] if found.item[2] == 1 else 1  # A grey one has all its channels equal.
    if (*found.item[:2], found.item[2] * repeat) != wanted:
        raise ValueError(
            f"{OWNER}: {path} is {shape_text(found.item)}, and the model makes images of {shape_text(wanted)}; give such"
        )
    for item in items:
        if not 0 <= item < found.count:
            raise ValueError(f"{OWNER}: items must be 0 to {found.count - 1:,}, got {item}; {path} has {found.count:,}")
    if not items and found.count > ITEMS:
        raise ValueError(f"{OWNER}: {path} has {found.count:,} images; say which, as in --items 0 1 2")
    places = np.array(items or range(found.count), np.int64)
    with _named(path):
        images: Bytes = found.read(places).reshape(len(places), *found.item)
    return [image.tobytes() for image in images.repeat(repeat, -1)]


def _kept(share: float | None, subject: Subject) -> int:
    """Bytes of whole rows."""
    share, height = 0.5 if share is None else share, subject.item[0]
    rows = round(height * share)
    if not 0 < rows < height:
        between = f"between {0.5 / height:.3g} and {1 - 0.5 / height:.3g}"
        raise ValueError(f"{OWNER}: keep_top = {share} keeps {rows} of {height} rows; give a number {between}")
    return rows * prod(subject.item[1:])


def _sound(path: Path, seconds: float | None, rate: int, context: int) -> bytes:
    least = max(1, round(min(rate * seconds, MOST))) if seconds is not None else 0
    if least >= context:
        most = int((context - 1) / rate * 1000) / 1000
        raise ValueError(
            f"{OWNER}: seconds = {seconds} is {least:,} bytes, and the context is {context:,}; give at most {most}"
        )
    wanted = least or min(rate, context // 2)
    found = bytearray()
    with _named(path):
        audio.about(path)  # It says what is wrong with a file that holds no sound.
        for piece in audio.read(path, rate):
            found += piece.tobytes()
            if len(found) >= wanted:
                break
    if len(found) < least:
        raise ValueError(f"{OWNER}: seconds = {seconds}, and {path} has {len(found) / rate:.3f}; give no more")
    return bytes(found[:wanted])


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file, as what is wrong with the argument."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        what = text.removeprefix(str(path)) if text.startswith(f"{path} ") else f": {text}"
        raise ValueError(f"{OWNER}: prompt_file = {str(path)!r}{what}; give another") from None
