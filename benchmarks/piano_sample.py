"""Synthesises the bundled 25 seconds of piano: the beginning of J. S. Bach's Prelude in C major, BWV 846.

python benchmarks/piano_sample.py src/longstride/data/samples/piano.u8.xz

The notes are written below; the sound is additive: each string has partials that are a little sharp, as stiff strings have
them, and that decay the faster the higher they are. A short noise is the hammer. The result is dedicated to the public
domain (CC0 1.0), and the piece is in it. Needs numpy alone.
"""

import lzma
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Sound = NDArray[np.float64]
RATE = 12_000
SECONDS = 25
PEAK = 0.95
BARS = """
C4 E4 G4 C5 E5
C4 D4 A4 D5 F5
B3 D4 G4 D5 F5
C4 E4 G4 C5 E5
C4 E4 A4 E5 A5
C4 D4 F#4 A4 D5
B3 D4 G4 D5 G5
B3 C4 E4 G4 C5
A3 C4 E4 G4 C5
D3 A3 D4 F#4 C5
"""
"""The chord of each bar, broken into sixteenths: 1 2 3 4 5 3 4 5, twice."""
ORDER = (0, 1, 2, 3, 4, 2, 3, 4)
SIXTEENTH = SECONDS / 10 / 16
HIGHEST = 5_600
"""Hertz: partials above it are left out, well below half the rate."""
NAMES = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    packed = lzma.compress(encode(prelude()).tobytes(), preset=9 | lzma.PRESET_EXTREME)
    Path(sys.argv[1]).write_bytes(packed)
    print(f"{sys.argv[1]}: {SECONDS} s, {len(packed):,} bytes packed")


def prelude() -> Sound:
    """The whole sound, with a peak of PEAK."""
    random = np.random.default_rng(846)
    sound = np.zeros(SECONDS * RATE)
    half_bars = [bar.split() for bar in BARS.split("\n") if bar for _ in range(2)]
    for number, chord in enumerate(half_bars):
        for place, index in enumerate(ORDER):
            begin = (8 * number + place) * SIXTEENTH + random.uniform(0, 0.012)
            accent = (1.25, 0.85, 0.7, 0.75, 0.95, 0.65, 0.7, 0.8)[place]
            # The two low notes are held to the end of the half bar, and the pedal keeps the others a little.
            held = (8 - place) * SIXTEENTH if index < 2 else 3 * SIXTEENTH
            note = strike(pitch(chord[index]), accent * random.uniform(0.85, 1.15), held, random)
            first = round(begin * RATE)
            sound[first : first + len(note)] += note[: len(sound) - first]
    return sound * (PEAK / np.abs(sound).max())


def pitch(name: str) -> float:
    """Frequency of a note such as F#4 in hertz, tuned to A4 = 440."""
    above_c = NAMES[name[0]] + name.count("#")
    return 440 * 2 ** ((12 * (int(name[-1]) - 4) + above_c - 9) / 12)


def strike(frequency: float, loudness: float, held: float, random: np.random.Generator) -> Sound:
    """The sound of one key. `held`: seconds until the damper falls."""
    time = np.arange(round((held + 0.35) * RATE)) / RATE
    stiffness = 3e-4 * (frequency / 262) ** 1.4
    phases = random.uniform(size=40)  # Those of both strings: one hammer strikes them.
    sound = np.zeros_like(time)
    for string in (-0.3, 0.4):  # Two strings, in cents: they beat slowly.
        tuned = frequency * 2 ** ((string + random.normal(0, 0.1)) / 1200)
        for partial in range(1, len(phases)):
            sharp = partial * tuned * np.sqrt(1 + stiffness * partial**2)
            if sharp > HIGHEST:
                break
            # Struck at an eighth of its length, the string lacks every eighth partial. Loud keys sound brighter.
            strength = abs(np.sin(np.pi * partial / 8)) / partial ** (2.4 - 0.35 * loudness)
            decay = (0.7 + 0.22 * partial) * (frequency / 262) ** 0.7
            envelope = 0.75 * np.exp(-2.6 * decay * time) + 0.25 * np.exp(-0.5 * decay * time)
            sound += strength * envelope * np.sin(2 * np.pi * (sharp * time + phases[partial]))
    sound += 0.05 * random.normal(size=len(time)) * np.exp(-time / 0.008)
    attack = np.minimum(time / 0.002, 1)
    damper = np.exp(-np.maximum(time - held, 0) / 0.07)
    return loudness * attack * damper * sound


def encode(x: Sound) -> NDArray[np.uint8]:
    """8-bit mu-law, as the package has it."""
    scaled = np.sign(x) * np.log1p(255 * np.abs(x)) / np.log(256)
    return np.minimum(np.floor((scaled + 1) * 128), 255).astype(np.uint8)


if __name__ == "__main__":
    main()
