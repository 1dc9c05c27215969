"""Small real data for a first run and for the tests. README.md beside this file has the sources and the licences."""

import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longstride.common.checks import suggest

FILES = {"text": "wikipedia.xz", "piano": "piano.u8.xz", "patches": "patches.npy.xz"}


def path(name: str) -> Path:
    """The packed file of the sample of that name: text, piano or patches."""
    if name not in FILES:
        raise ValueError(f"there is no sample {name!r}; {suggest(name, FILES)}")
    return Path(__file__).with_name(FILES[name])


def text() -> NDArray[np.uint8]:
    """1,000,000 bytes of Wikipedia."""
    return _stream("text")


def piano() -> NDArray[np.uint8]:
    """25 seconds of piano at 12 kHz: 300,000 samples, 8-bit mu-law."""
    return _stream("piano")


def patches() -> NDArray[np.uint8]:
    """905 overlapping pieces of a photograph: [n, 32, 32, 3], RGB."""
    with lzma.open(path("patches")) as file:
        images: NDArray[np.uint8] = np.lib.format.read_array(file, allow_pickle=False)
    return images


def _stream(name: str) -> NDArray[np.uint8]:
    # A bytearray, so that the array can be written to, as one from a file can.
    return np.frombuffer(bytearray(lzma.decompress(path(name).read_bytes())), np.uint8)
