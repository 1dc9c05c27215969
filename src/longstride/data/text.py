"""Text as its bytes, plain or compressed (.gz, .xz, .bz2, .zip)."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

from longstride.data.kind import DataKind
from longstride.data.limits import Limit
from longstride.data.plan import Bytes, Plan
from longstride.data.streams import read_start, stream_plan, to_file

MILLION = 1_000_000
KNOWN_SPLITS = {
    100 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION, "test": 5 * MILLION},
    95 * MILLION: {"train": 90 * MILLION, "valid": 5 * MILLION},
}
"""The standard splits of enwik8, complete and without its test bytes."""
INSPECTED_BYTES = 1 << 16

AROUND = 8
"""Bytes on each side of the one that `describe_place` shows."""
LONGEST_CHARACTER = 4
"""Bytes in UTF-8."""
CONTINUED = "‿"
"""Stands for the second and later bytes of a character."""
SIGNS = {10: "↵", 9: "→"}
UNSHOWN = "·"
"""Stands for a byte that is no printable ASCII and in no character that the font has."""


class Text(DataKind):
    name = "text"
    label = "text"
    nouns = ("text", "texts")
    ending = ".txt"
    can_join = True
    is_printed = True
    default_length = 500
    letters_per_byte = 1
    signs = (
        (CONTINUED, "a further byte of a letter"),
        ("↵", "a line end"),
        ("→", "a tab"),
        (UNSHOWN, "a byte of no letter that the font has"),
    )

    @classmethod
    def plan(
        cls, source: Path, limit: Limit | None = None, join: bool = False, others: Sequence[str] = ()
    ) -> Plan:  # fmt: skip
        """Plans a text file, or all files of a folder except those with suffixes of other kinds."""
        return stream_plan(cls.name, source, True, limit, join, KNOWN_SPLITS, others)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether the start of a file, decompressed, is UTF-8 without zero bytes."""
        start = read_start(path, True, INSPECTED_BYTES)
        try:
            # The last character may be cut off.
            codecs.getincrementaldecoder("utf-8")().decode(start)
        except UnicodeDecodeError:
            return False
        return b"\0" not in start

    @classmethod
    def recognizes_folder(cls, folder: Path, paths: Sequence[Path]) -> bool:
        return all(map(cls.recognizes, paths))

    def write_sample(self, data: bytes, path: Path, scale: int = 1) -> None:
        """Writes UTF-8. Bytes that are none become U+FFFD."""
        to_file(_decode(data).encode(), path)

    def write_together(
        self, samples: Sequence[bytes], path: Path, prompts: Sequence[bytes], originals: Sequence[bytes], scale: int = 1
    ) -> None:  # fmt: skip
        """Writes the samples with a title above each, or a single one without."""
        if len(samples) == 1:
            return self.write_sample(samples[0], path)
        titled = [f"==== sample {number} ====\n{_decode(sample)}\n" for number, sample in enumerate(samples)]
        to_file("\n".join(titled).encode(), path)

    def byte_label(self, byte: int) -> str:
        if byte == 32:
            return "a space"
        return f"'{self.spell_byte(byte)}'" if 32 < byte < 127 or byte in SIGNS else f"byte {byte}"

    def spell_byte(self, byte: int) -> str:
        """Printable ASCII as itself; a sign for other bytes."""
        return SIGNS.get(byte, chr(byte) if 32 <= byte < 127 else UNSHOWN)

    def spell(self, tokens: Bytes, first: int, end: int, has_glyph: Callable[[str], bool]) -> str:
        """One letter for each byte. A character of several bytes stands at its first one, if the font has it, and CONTINUED
        at the others. A character that is not complete before `end` is not shown."""
        start = max(0, first - LONGEST_CHARACTER + 1)  # The character at `first` may begin there.
        data = tokens[start:end].tobytes()
        letters = [self.spell_byte(byte) for byte in data]
        place = 0
        for character in data.decode("utf-8", "surrogateescape"):
            size = len(character.encode("utf-8", "surrogateescape"))
            if size > 1 and has_glyph(character):
                letters[place : place + size] = [character, *CONTINUED * (size - 1)]
            place += size
        return "".join(letters[first - start :])

    def describe_place(self, tokens: Bytes, place: int, position: int, has_glyph: Callable[[str], bool]) -> str:
        """The byte in brackets, between the bytes around it."""
        first, end = max(0, place - AROUND), min(place + 1 + AROUND, position)
        around = self.spell(tokens, first, min(end + LONGEST_CHARACTER - 1, position), has_glyph)[: end - first]
        before, this, after = around[: place - first], around[place - first], around[place - first + 1 :]
        return f"{position - place:>5,} back  {before:>{AROUND}}[{this}]{after}"


def _decode(sample: bytes) -> str:
    return sample.decode("utf-8", "replace")
