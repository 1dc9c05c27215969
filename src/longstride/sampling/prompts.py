"""Prompts of samples: text, a file, the upper part of images, or the beginning of a sound."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from longstride.data import audio
from longstride.data.images import open_images, shape_text
from longstride.data.store import Bytes
from longstride.sampling.format import SampleFormat
from longstride.sampling.request import OWNER, Request

TEXT_LENGTH = 500
"""Default length of text samples in bytes."""
MOST_ITEMS = 64
"""The most images completed without --items: completing a whole data set is hardly intended."""


@dataclass(frozen=True)
class Prompts:
    prompts: list[bytes]
    """One per sample."""
    length: int | None
    """Bytes to generate after each prompt; None: up to the context."""
    originals: list[bytes]
    """The images to complete; each has the same number of samples."""


def read_prompts(request: Request, sample_format: SampleFormat, context: int) -> Prompts:
    """Returns the prompts of a request; ValueError if they do not fit the model."""
    _check_request(request, sample_format.kind)
    if sample_format.kind == "images":
        originals = (
            [] if request.prompt_file is None else _read_images(request.prompt_file, request.items, sample_format.item)
        )
        kept_bytes = _kept_bytes(request.keep_top, sample_format.item) if originals else 0
        prompts = [original[:kept_bytes] for original in originals or [b""] for _ in range(request.count)]
        return Prompts(prompts, prod(sample_format.item) - kept_bytes, originals)
    if request.prompt_file is None:
        prompt = (request.prompt or "").encode("utf-8", "surrogateescape")  # Any bytes typed, also invalid UTF-8.
    elif request.prompt_file.is_dir():
        raise ValueError(f"{OWNER}: prompt_file = {str(request.prompt_file)!r} is a folder; give a file in it")
    elif sample_format.kind == "audio":
        prompt = _read_sound(request.prompt_file, request.seconds, sample_format.rate, context)
    else:
        prompt = request.prompt_file.read_bytes()
    if len(prompt) >= context:
        given = "prompt" if request.prompt_file is None else f"prompt_file = {str(request.prompt_file)!r}"
        raise ValueError(
            f"{OWNER}: {given} has {len(prompt):,} bytes, and the context is {context:,}; give at most {context - 1:,}"
        )
    length = request.length
    if length is None and sample_format.kind == "text":
        length = max(1, min(TEXT_LENGTH, context - len(prompt)))
    return Prompts([prompt] * request.count, length, [])


def _check_request(request: Request, kind: str) -> None:
    """Raises ValueError for options that are not for this kind of data."""
    if request.prompt is not None and kind in ("images", "audio"):
        like = "an image, as in --prompt-file a.png" if kind == "images" else "a sound, as in --prompt-file a.wav"
        raise ValueError(f"{OWNER}: prompt = {request.prompt!r} is text, and the model makes {kind}; give {like}")
    if request.length is not None and kind == "images":
        raise ValueError(f"{OWNER}: length = {request.length} is not for images, which are made whole; leave it out")
    if request.scale > 1 and kind != "images":
        raise ValueError(f"{OWNER}: scale = {request.scale} is for images, and the model makes {kind}; leave it out")
    for name, right_kind in (("keep_top", "images"), ("items", "images"), ("seconds", "audio")):
        value = getattr(request, name)
        if value in (None, ()):
            continue
        if kind != right_kind:
            raise ValueError(f"{OWNER}: {name} = {value} is for {right_kind}, and the model makes {kind}; leave it out")
        if request.prompt_file is None:
            raise ValueError(f"{OWNER}: {name} = {value} says what is kept of --prompt-file; give that, too")


def _read_images(path: Path, items: tuple[int, ...], wanted: tuple[int, ...]) -> list[bytes]:
    """Returns the bytes of images from a file or folder; `wanted`: their height, width and channels."""
    with _naming_argument(path):
        images = open_images(path)
    repeat = wanted[2] if images.item[2] == 1 else 1  # A grey image gets equal channels.
    if (*images.item[:2], images.item[2] * repeat) != wanted:
        raise ValueError(
            f"{OWNER}: {path} is {shape_text(images.item)}, and the model makes images of {shape_text(wanted)}; give such"
        )
    for item in items:
        if not 0 <= item < images.count:
            raise ValueError(f"{OWNER}: items must be 0 to {images.count - 1:,}, got {item}; {path} has {images.count:,}")
    if not items and images.count > MOST_ITEMS:
        raise ValueError(f"{OWNER}: {path} has {images.count:,} images; say which, as in --items 0 1 2")
    indices = np.array(items or range(images.count), np.int64)
    with _naming_argument(path):
        pixels: Bytes = images.read(indices).reshape(len(indices), *images.item)
    return [image.tobytes() for image in pixels.repeat(repeat, -1)]


def _kept_bytes(share: float | None, item: tuple[int, ...]) -> int:
    """Returns the bytes of the rows that are kept of an image; half of them for None."""
    share, height = 0.5 if share is None else share, item[0]
    rows = round(height * share)
    if not 0 < rows < height:
        between = f"between {0.5 / height:.3g} and {1 - 0.5 / height:.3g}"
        raise ValueError(f"{OWNER}: keep_top = {share} keeps {rows} of {height} rows; give a number {between}")
    return rows * prod(item[1:])


def _read_sound(path: Path, seconds: float | None, rate: int, context: int) -> bytes:
    """Returns the beginning of a sound as mu-law bytes; by default a second, at most half of the context."""
    least = max(1, round(rate * seconds)) if seconds is not None else 0
    if least >= context:
        most = int((context - 1) / rate * 1000) / 1000
        raise ValueError(
            f"{OWNER}: seconds = {seconds} is {least:,} bytes, and the context is {context:,}; give at most {most}"
        )
    wanted = least or min(rate, context // 2)
    data = bytearray()
    with _naming_argument(path):
        audio.about(path)  # Raises if the file has no sound.
        for piece in audio.read(path, rate):
            data += piece.tobytes()
            if len(data) >= wanted:
                break
    if len(data) < least:
        raise ValueError(f"{OWNER}: seconds = {seconds}, and {path} has {len(data) / rate:.3f}; give no more")
    return bytes(data[:wanted])


@contextmanager
def _naming_argument(path: Path) -> Iterator[None]:
    """Context that names the argument in errors about the file."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        what = text.removeprefix(str(path)) if text.startswith(f"{path} ") else f": {text}"
        raise ValueError(f"{OWNER}: prompt_file = {str(path)!r}{what}; give another") from None
