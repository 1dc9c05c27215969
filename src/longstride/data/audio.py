"""Sound as bytes: mono, 12,000 samples a second, 8-bit mu-law; and back to a wav file."""

import math
import sys
import wave
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstride.common.atomic import atomic_path
from longstride.data.limits import Limit
from longstride.data.plan import ENCODED, SOUNDS, Plan, cut, ending, files_under, is_packed, named_splits, optional
from longstride.data.store import READ, Bytes
from longstride.data.streams import gathered, measured, span

RATE = 12_000
ENDINGS = SOUNDS + ENCODED
"""ENCODED files hold the bytes of `encode` already, at RATE. G.711 has other codes."""
SHARE = 0.05
RATES = range(1_000, 768_001)
"""Samples a second that are resampled. Far from RATE a sample becomes thousands, for which soxr takes memory at once."""
CHANNELS = 64
UNKNOWN = 2**62
"""From so many frames on, a header says that it does not know."""


def encode(samples: ArrayLike) -> Bytes:
    """Samples from -1 to 1 as mu-law codes 0 .. 255."""
    x = np.clip(np.asarray(samples, np.float64), -1, 1)
    companded = np.sign(x) * np.log1p(255 * np.abs(x)) / math.log(256)
    codes: Bytes = np.minimum(np.floor((companded + 1) * 128), 255).astype(np.uint8)
    return codes


def decode(codes: bytes | Bytes) -> NDArray[np.float64]:
    """The middle of each code's cell, on mu-law's scale: encode(decode(code)) is the code."""
    codes = np.frombuffer(codes, np.uint8) if isinstance(codes, bytes | bytearray) else np.asarray(codes, np.uint8)
    companded = (codes + 0.5) / 128 - 1
    return np.sign(companded) * np.expm1(np.abs(companded) * math.log(256)) / 255


def to_wav(data: bytes | Bytes, path: str | Path, rate: int = RATE) -> None:
    """Codes as a wav file of 16 bits. These are fine enough for the same codes to come back."""
    samples = np.clip(np.round(decode(data) * 32768), -32768, 32767).astype("<i2")
    with atomic_path(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def read(path: Path, rate: int = RATE, limit: Limit | None = None) -> Iterator[Bytes]:
    """The codes of one file, a piece at a time. One that holds codes already has them at `rate`, whatever that is."""
    limit = limit or Limit(path)
    if ending(path) in ENCODED:
        yield from span([measured(path, is_packed(path), limit)], is_packed(path), 0, sys.maxsize)
        return
    with _sound(path) as file:
        stream = None
        if file.samplerate != rate:
            if rate not in RATES:
                raise ValueError(f"{path}: sound is resampled to {RATES[0]:,} to {RATES[-1]:,} Hz, not to {rate:,}")
            soxr = optional("soxr", f"{path}: {file.samplerate} Hz to {rate} Hz")
            stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
        # Blocks as large as to take about READ bytes before and after resampling. Their number is not the header's: it lies.
        size = max(1, READ // 8 // max(file.channels, math.ceil(rate / file.samplerate)))
        while True:
            with _refusing(path):
                block = file.read(size, dtype="float32", always_2d=True)
            if not len(block):
                break
            mono = block.mean(axis=1, dtype=np.float32)
            if not np.isfinite(mono).all():
                raise ValueError(f"{path} holds samples that are not finite numbers")
            codes = encode(stream.resample_chunk(mono) if stream else mono)
            limit.take(path, len(codes))
            yield codes
        if stream:
            yield encode(stream.resample_chunk(np.zeros(0, np.float32), last=True))


@contextmanager
def _sound(path: Path) -> Iterator[Any]:
    """An open file of sound, with a rate and a number of channels that can be read."""
    soundfile = optional("soundfile", f"{path}: reading sound")
    with ExitStack() as stack:
        with _refusing(path):
            file = stack.enter_context(soundfile.SoundFile(path))
        if file.samplerate not in RATES:
            raise ValueError(f"{path} has a rate of {file.samplerate:,} Hz; {RATES[0]:,} to {RATES[-1]:,} Hz can be read")
        if file.channels > CHANNELS:
            raise ValueError(f"{path} has {file.channels:,} channels; up to {CHANNELS} can be read")
        yield file


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # A broken file may raise anything.
        raise ValueError(f"{path} cannot be read as sound: {error}") from None


def about(path: Path, limit: Limit | None = None) -> int:
    """How many bytes a file gives, by its header; also finds files that are not what their names say."""
    limit = limit or Limit(path)
    if ending(path) in ENCODED:
        size = measured(path, is_packed(path), Limit(path, limit.most)).size
    elif size := path.stat().st_size:
        with _sound(path) as file:
            frames, rate = file.frames, file.samplerate
        if frames >= UNKNOWN:
            raise ValueError(f"{path} does not say how many samples it has; encode it again")
        size = round(frames * RATE / rate)
        limit.check(path, f"{frames:,} samples, as its header says,", size)
    if size == 0:
        raise ValueError(f"{path} is empty: it holds no sound")
    return size


def plan(source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """One file is cut 90/5/5 per cent. Of a folder whole files go to train, valid and test, in sorted order, unless files or
    folders in it are named so; with `join` names do not count."""
    limit = limit or Limit(source)
    paths = files_under(source, ENDINGS) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source} holds no sound; looked for {', '.join(ENDINGS)}")
    form = f"mono, {RATE} Hz, 8-bit mu-law"
    if len(paths) == 1:
        about(paths[0], limit)
        return _one(paths[0], f"{source.name}: {form}", limit)
    groups = None if join else named_splits(source, paths)
    if groups:
        paths = [path for members in groups.values() for path in members]
    sizes = {path: about(path, limit) for path in paths}
    how = "splits as its files are named" if groups else "whole files, in sorted order"
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    for name, members in (groups or assign(sizes)).items():
        splits[name] = chain.from_iterable(read(path, RATE, limit) for path in members)
    return Plan("audio", splits, sum(sizes.values()), f"{source.name}: {form}; {how}", rate=RATE, used=paths)


def assign(sizes: dict[Path, int]) -> dict[str, list[Path]]:
    """Files from the end of the list for test, then valid, each as near to 5 per cent of the bytes as whole files come."""
    left = list(sizes)
    target = SHARE * sum(sizes.values())
    taken: dict[str, list[Path]] = {}
    for name in ("test", "valid") if len(left) > 2 else ("valid",):
        others = 2 if name == "test" else 1
        size, chosen = 0, list[Path]()
        while len(left) > others and (not chosen or size + sizes[left[-1]] / 2 < target):
            size += sizes[left[-1]]
            chosen.insert(0, left.pop())
        taken[name] = chosen
    return {"train": left} | {name: taken[name] for name in ("valid", "test") if name in taken}


def _one(path: Path, source: str, limit: Limit) -> Plan:
    # How many samples resampling gives is known only afterwards.
    codes = gathered(read(path, RATE, limit))
    start = 0
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    for name, size in cut(path, len(codes), "samples").items():
        splits[name] = codes[start : start + size]
        start += size
    return Plan("audio", splits, len(codes), f"{source}; in order, 90/5/5 per cent", rate=RATE, used=[path])
