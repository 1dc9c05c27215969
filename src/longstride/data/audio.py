"""Sound as bytes: mono, 12,000 samples per second, 8-bit mu-law; and back to a WAV file."""

import math
import sys
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longstride.common.atomic import atomic_path
from longstride.common.checks import LARGEST_INTEGER, short_repr, whole_number
from longstride.common.lazy import import_optional
from longstride.data.kind import DataKind, Prompt, name_prompt_in_errors
from longstride.data.limits import Limit
from longstride.data.plan import (
    READ,
    Bytes,
    Plan,
    data_suffix,
    files_under,
    is_compressed,
    named_splits,
    split_sizes,
)
from longstride.data.streams import gather, measure, name_file_in_errors, read_span

RATE = 12_000
SOUNDS = (".wav", ".flac", ".ogg", ".mp3")
ENCODED = (".u8", ".ulaw")
"""Suffixes of files that hold the output of `encode` at RATE, possibly compressed (piano.u8.xz). G.711 has other codes."""
SILENCE = b"\x80"
PAUSE = 0.25
"""Seconds of silence between two sounds in one file."""
SHARE = 0.05
LEAST_TRAINING = 0.7
RATES = range(1_000, 768_001)
"""Supported sample rates. Far below RATE one sample becomes thousands, which soxr holds in memory at once."""
CHANNELS = 64
UNKNOWN_LENGTH = 2**62
"""A header with this many frames or more does not know its length."""


class Audio(DataKind):
    name = "audio"
    label = "sound"
    nouns = ("sound", "sounds")
    suffixes = SOUNDS + ENCODED
    presets = ("audio-small", "audio-medium", "music-65536", "music-262144", "music-1048576")
    ending = ".wav"
    needs_ending = True
    can_join = True
    prompt_example = "a sound, as in --prompt-file a.wav"
    prompt_options = ("seconds",)

    @classmethod
    def plan(
        cls, source: Path, limit: Limit | None = None, join: bool = False, others: Sequence[str] = ()
    ) -> Plan:  # fmt: skip
        """Plans one file, split 90/5/5 per cent, or a folder, whose files go to train, valid and test by `assign_files`,
        unless files or folders are named so; with `join` names do not count."""
        limit = limit or Limit(source)
        paths = files_under(source, cls.suffixes) if source.is_dir() else [source]
        if not paths:
            raise ValueError(f"{source} holds no sound; looked for {', '.join(cls.suffixes)}")
        form = f"mono, {RATE} Hz, 8-bit mu-law"
        if len(paths) == 1:
            expected_bytes(paths[0], limit)
            return _plan_file(paths[0], f"{source.name}: {form}", limit)
        groups = None if join else named_splits(source, paths)
        if groups:
            paths = [path for members in groups.values() for path in members]
        sizes = {path: expected_bytes(path, limit) for path in paths}
        how = "splits as its files are named" if groups else "whole files, in sorted order, or the smallest held out"
        splits: dict[str, Iterable[Bytes] | Bytes] = {}
        for name, members in (groups or assign_files(sizes)).items():
            splits[name] = chain.from_iterable(read(path, RATE, limit) for path in members)
        return Plan(cls.name, splits, sum(sizes.values()), f"{source.name}: {form}; {how}", rate=RATE, used=paths)

    @classmethod
    def describe_misnamed(cls, start: bytes) -> str | None:
        if start.startswith((b"fLaC", b"OggS", b"ID3")) or (start[:4], start[8:12]) == (b"RIFF", b"WAVE"):
            return f"holds sound; give it the ending {', '.join(SOUNDS)}"
        return None

    @classmethod
    def check_form(cls, owner: str, item: Sequence[Any], rate: object) -> None:
        if item:
            raise ValueError(f"{owner}: item of {cls.name} must be empty, got {short_repr(list(item))}")
        rate = whole_number(owner, "rate", rate, 1)
        if rate > RATES[-1]:  # A wav file could not hold it, and a second of silence would fill the memory.
            raise ValueError(f"{owner}: rate must be at most {RATES[-1]:,}, got {rate:,}")

    @classmethod
    def of_model(cls, owner: str, known: DataKind | None, sizes: tuple[int, ...], embedding: str) -> Self:
        return cls(rate=(known.rate if known else None) or RATE)

    def write_sample(self, data: bytes, path: Path, scale: int = 1) -> None:
        to_wav(data, path, self.rate or RATE)

    def write_together(
        self, samples: Sequence[bytes], path: Path, prompts: Sequence[bytes], originals: Sequence[bytes], scale: int = 1
    ) -> None:  # fmt: skip
        """Writes one sound after the other, with pauses."""
        rate = self.rate or RATE
        to_wav((SILENCE * round(PAUSE * rate)).join(samples), path, rate)

    def write_examples(self, sequences: Bytes, folder: Path, stem: str) -> Path:
        path = folder / f"{stem}.wav"
        to_wav(sequences.ravel(), path, self.rate or RATE)
        return path

    def read_prompts(self, owner: str, path: Path, context: int, options: Mapping[str, Any]) -> list[Prompt]:
        """Reads the first `seconds` of a file; by default one second, or half of the context if that is less."""
        if path.is_dir():
            raise ValueError(f"{owner}: prompt_file = {str(path)!r} is a folder; give a file in it")
        rate, seconds = self.rate or RATE, options["seconds"]
        least = max(1, round(min(rate * seconds, LARGEST_INTEGER))) if seconds is not None else 0
        if least >= context:
            most = int((context - 1) / rate * 1000) / 1000
            raise ValueError(
                f"{owner}: seconds = {seconds} is {least:,} bytes, and the context is {context:,}; give at most {most}"
            )
        wanted = least or min(rate, context // 2)
        codes = bytearray()
        with name_prompt_in_errors(owner, path):
            expected_bytes(path)  # Its message says what is wrong with a file that holds no sound.
            for piece in read(path, rate):
                codes += piece.tobytes()
                if len(codes) >= wanted:
                    break
        if len(codes) < least:
            raise ValueError(f"{owner}: seconds = {seconds}, and {path} has {len(codes) / rate:.3f}; give no more")
        return [Prompt(bytes(codes[:wanted]))]

    def byte_label(self, byte: int) -> str:
        return f"{decode(bytes([byte]))[0]:+.3f}"

    def describe_place(self, tokens: Bytes, place: int, position: int, has_glyph: Callable[[str], bool]) -> str:
        back = position - place
        return f"{1000 * back / (self.rate or RATE):>8,.1f} ms back ({back:,})"

    def signal(self, tokens: Bytes) -> NDArray[np.float64]:
        return decode(tokens)


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
    """Writes codes as a 16-bit WAV file, which is precise enough to recover the same codes."""
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
        yield from read_span([measure(path, is_compressed(path), limit)], is_compressed(path), 0, sys.maxsize)
        return
    with _open_sound(path) as file:
        stream = None
        if file.samplerate != rate:
            if rate not in RATES:
                raise ValueError(f"{path}: sound is resampled to {RATES[0]:,} to {RATES[-1]:,} Hz, not to {rate:,}")
            soxr = import_optional("soxr", f"{path}: {file.samplerate} Hz to {rate} Hz", "data")
            stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
        # Blocks of about READ bytes before and after resampling. Read to the end: the header's length may be wrong.
        size = max(1, READ // 8 // max(file.channels, math.ceil(rate / file.samplerate)))
        while True:
            with name_file_in_errors(path, "sound"):
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
    soundfile = import_optional("soundfile", f"{path}: reading sound", "data")
    with ExitStack() as stack:
        with name_file_in_errors(path, "sound"):
            file = stack.enter_context(soundfile.SoundFile(path))
        if file.samplerate not in RATES:
            raise ValueError(f"{path} has a rate of {file.samplerate:,} Hz; {RATES[0]:,} to {RATES[-1]:,} Hz can be read")
        if file.channels > CHANNELS:
            raise ValueError(f"{path} has {file.channels:,} channels; up to {CHANNELS} can be read")
        yield file


def expected_bytes(path: Path, limit: Limit | None = None) -> int:
    """Returns how many bytes `read` gives for a file, by its header; ValueError if it holds no sound."""
    limit = limit or Limit(path)
    if data_suffix(path) in ENCODED:
        size = measure(path, is_compressed(path), Limit(path, limit.most)).size
    elif size := path.stat().st_size:
        with _open_sound(path) as file:
            frames, rate = file.frames, file.samplerate
        if frames >= UNKNOWN_LENGTH:
            raise ValueError(f"{path} does not say how many samples it has; encode it again")
        size = round(frames * RATE / rate)
        limit.check(path, f"{frames:,} samples, as its header says,", size)
    if size == 0:
        raise ValueError(f"{path} is empty: it holds no sound; remove it")
    return size


def assign_files(sizes: dict[Path, int]) -> dict[str, list[Path]]:
    """Assigns files from the end of the list to test, then valid, each as close to 5 per cent of the bytes as possible.

    If that leaves train less than LEAST_TRAINING, the smallest file is test, the next one valid, and all others train.
    """
    assigned = _assign(list(sizes), SHARE * sum(sizes.values()), sizes)
    if sum(sizes[path] for path in assigned["train"]) < LEAST_TRAINING * sum(sizes.values()):
        return _assign(sorted(sizes, key=lambda path: -sizes[path]), 0, sizes)
    return assigned


def _assign(left: list[Path], target: float, sizes: dict[Path, int]) -> dict[str, list[Path]]:
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
