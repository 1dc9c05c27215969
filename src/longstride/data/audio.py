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
from longstride.data.plan import (
    ENCODED,
    SOUNDS,
    Plan,
    data_suffix,
    files_under,
    is_packed,
    named_splits,
    optional,
    split_sizes,
)
from longstride.data.store import MAX_RATE, READ, Bytes
from longstride.data.streams import gather, measure, read_span

RATE = 12_000
ENDINGS = SOUNDS + ENCODED
"""ENCODED files hold the output of `encode`, at RATE. The codes differ from those of G.711."""
SHARE = 0.05
RATES = range(1_000, MAX_RATE + 1)
"""Supported sample rates. Far below RATE one sample becomes thousands, which soxr holds in memory at once."""
CHANNELS = 64
UNKNOWN_LENGTH = 2**62
"""A header with this many frames or more does not know its length."""


def encode(samples: ArrayLike) -> Bytes:
    """Encodes samples from -1 to 1 as mu-law codes 0 .. 255."""
    x = np.clip(np.asarray(samples, np.float64), -1, 1)
    companded = np.sign(x) * np.log1p(255 * np.abs(x)) / math.log(256)
    codes: Bytes = np.minimum(np.floor((companded + 1) * 128), 255).astype(np.uint8)
    return codes


def decode(codes: bytes | Bytes) -> NDArray[np.float64]:
    """Decodes mu-law codes to the middle of their quantization interval, so that encode(decode(code)) == code."""
    codes = np.frombuffer(codes, np.uint8) if isinstance(codes, bytes | bytearray) else np.asarray(codes, np.uint8)
    companded = (codes + 0.5) / 128 - 1
    return np.sign(companded) * np.expm1(np.abs(companded) * math.log(256)) / 255


def to_wav(data: bytes | Bytes, path: str | Path, rate: int = RATE) -> None:
    """Writes codes as a 16-bit wav file, which is precise enough to recover the same codes."""
    samples = np.clip(np.round(decode(data) * 32768), -32768, 32767).astype("<i2")
    with atomic_path(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def read(path: Path, rate: int = RATE, limit: Limit | None = None) -> Iterator[Bytes]:
    """Yields the codes of one file, piece by piece, resampled to `rate`. Files of codes are taken to be at `rate`."""
    limit = limit or Limit(path)
    if data_suffix(path) in ENCODED:
        yield from read_span([measure(path, is_packed(path), limit)], is_packed(path), 0, sys.maxsize)
        return
    with _open_sound(path) as file:
        stream = None
        if file.samplerate != rate:
            if rate not in RATES:
                raise ValueError(f"{path}: sound is resampled to {RATES[0]:,} to {RATES[-1]:,} Hz, not to {rate:,}")
            soxr = optional("soxr", f"{path}: {file.samplerate} Hz to {rate} Hz")
            stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
        # Blocks of about READ bytes before and after resampling. Read to the end: the header's length may be wrong.
        size = max(1, READ // 8 // max(file.channels, math.ceil(rate / file.samplerate)))
        while True:
            with _name_file_in_errors(path):
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
def _open_sound(path: Path) -> Iterator[Any]:
    """Opens a sound file; ValueError if its rate or number of channels is not supported."""
    soundfile = optional("soundfile", f"{path}: reading sound")
    with ExitStack() as stack:
        with _name_file_in_errors(path):
            file = stack.enter_context(soundfile.SoundFile(path))
        if file.samplerate not in RATES:
            raise ValueError(f"{path} has a rate of {file.samplerate:,} Hz; {RATES[0]:,} to {RATES[-1]:,} Hz can be read")
        if file.channels > CHANNELS:
            raise ValueError(f"{path} has {file.channels:,} channels; up to {CHANNELS} can be read")
        yield file


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # A broken file may raise anything.
        raise ValueError(f"{path} cannot be read as sound: {error}") from None


def about(path: Path, limit: Limit | None = None) -> int:
    """Returns how many bytes a file gives, by its header. Also finds files that are no sound."""
    limit = limit or Limit(path)
    if data_suffix(path) in ENCODED:
        size = measure(path, is_packed(path), Limit(path, limit.most)).size
    elif size := path.stat().st_size:
        with _open_sound(path) as file:
            frames, rate = file.frames, file.samplerate
        if frames >= UNKNOWN_LENGTH:
            raise ValueError(f"{path} does not say how many samples it has; encode it again")
        size = round(frames * RATE / rate)
        limit.check(path, f"{frames:,} samples, as its header says,", size)
    if size == 0:
        raise ValueError(f"{path} is empty: it holds no sound")
    return size


def plan(source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """Plans one file, split 90/5/5 per cent, or a folder, whose files go to train, valid and test in sorted order, unless
    files or folders are named so; with `join` names do not count."""
    limit = limit or Limit(source)
    paths = files_under(source, ENDINGS) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source} holds no sound; looked for {', '.join(ENDINGS)}")
    form = f"mono, {RATE} Hz, 8-bit mu-law"
    if len(paths) == 1:
        about(paths[0], limit)
        return _plan_file(paths[0], f"{source.name}: {form}", limit)
    groups = None if join else named_splits(source, paths)
    if groups:
        paths = [path for members in groups.values() for path in members]
    sizes = {path: about(path, limit) for path in paths}
    how = "splits as its files are named" if groups else "whole files, in sorted order"
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    for name, members in (groups or assign_files(sizes)).items():
        splits[name] = chain.from_iterable(read(path, RATE, limit) for path in members)
    return Plan("audio", splits, sum(sizes.values()), f"{source.name}: {form}; {how}", rate=RATE, used=paths)


def assign_files(sizes: dict[Path, int]) -> dict[str, list[Path]]:
    """Assigns files from the end of the list to test, then valid, each as close to 5 per cent of the bytes as possible."""
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


def _plan_file(path: Path, source: str, limit: Limit) -> Plan:
    # The number of resampled samples is known only afterwards.
    codes = gather(read(path, RATE, limit))
    start = 0
    splits: dict[str, Iterable[Bytes] | Bytes] = {}
    for name, size in split_sizes(path, len(codes), "samples").items():
        splits[name] = codes[start : start + size]
        start += size
    return Plan("audio", splits, len(codes), f"{source}; in order, 90/5/5 per cent", rate=RATE, used=[path])
