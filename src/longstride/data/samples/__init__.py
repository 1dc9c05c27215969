"""Small data for a first run and for the tests. README.md beside this file has the sources and the licences."""

import hashlib
import lzma
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longstride.common.checks import suggest
from longstride.data.audio import RATE
from longstride.data.hashes import data_cache
from longstride.data.store import Store, write_store

FILES = {
    "text": "wikipedia.xz",
    "unseen-text": "wikipedia-unseen.xz",
    "piano": "piano.u8.xz",
    "patches": "patches.npy.xz",
}


def path(name: str) -> Path:
    """The packed file of the sample of that name: text, unseen-text, piano or patches."""
    if name not in FILES:
        raise ValueError(f"there is no sample {name!r}; {suggest(name, FILES)}")
    return Path(__file__).with_name(FILES[name])


def text() -> NDArray[np.uint8]:
    """1,000,000 bytes of Wikipedia."""
    return _stream("text")


def unseen_text() -> NDArray[np.uint8]:
    """65,536 bytes of Wikipedia from enwik8's validation part, which no model here is trained on."""
    return _stream("unseen-text")


def piano() -> NDArray[np.uint8]:
    """25 seconds of synthesised piano at 12 kHz: 300,000 samples, 8-bit mu-law."""
    return _stream("piano")


def patches() -> NDArray[np.uint8]:
    """905 overlapping pieces of a photograph: [n, 32, 32, 3], RGB."""
    with lzma.open(path("patches")) as file:
        images: NDArray[np.uint8] = np.lib.format.read_array(file, allow_pickle=False)
    return images


def store(name: str) -> Store:
    """A store in the cache whose splits, train and valid, are both the whole sample of that name."""
    data = patches() if name == "patches" else _stream(name)
    kind, rate = {"patches": ("images", None), "piano": ("audio", RATE)}.get(name, ("text", None))
    place = data_cache() / f"sample-{name}-{hashlib.sha256(data.tobytes()).hexdigest()[:16]}"
    splits = dict.fromkeys(("train", "valid"), data.ravel())
    written = write_store(place, kind, splits, data.shape[1:], rate, f"{FILES[name]}, bundled with longstride")
    return replace(written, given=path(name))


def _stream(name: str) -> NDArray[np.uint8]:
    # A bytearray, so that the array can be written to, as one from a file can.
    return np.frombuffer(bytearray(lzma.decompress(path(name).read_bytes())), np.uint8)
