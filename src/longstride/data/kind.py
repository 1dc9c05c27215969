"""The interface of a kind of data: from files to bytes, from bytes to files, and what pictures show of the bytes.

A new kind is a subclass of `DataKind` in a file of its own and a line in `kinds.py`. The defaults here are those of a stream
of bytes without further structure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from longstride.common.atomic import atomic_path
from longstride.common.checks import short_repr
from longstride.data.limits import Limit
from longstride.data.plan import Bytes, Plan
from longstride.data.streams import to_file

EXAMPLE_BYTES = 2000
"""The most bytes of a stream that `write_examples` writes as text."""


@dataclass(frozen=True)
class Prompt:
    """The start of a sample, read from a file."""

    data: bytes
    original: bytes = b""
    """The whole item that `data` is the start of; empty for streams."""


@dataclass(frozen=True)
class DataKind:
    """A kind of data, with the shape or the rate of its samples.

    `owner` in the methods below begins every error message: the command or file that the error is about.
    """

    item: tuple[int, ...] = ()
    """Height, width and channels of an image; empty for a stream of bytes."""
    rate: int | None = None
    """Samples per second, for sound."""

    name: ClassVar[str]
    """Name in manifests and for --kind."""
    label: ClassVar[str]
    """Name in messages: "sound"."""
    nouns: ClassVar[tuple[str, str]] = ("sample", "samples")
    """Singular and plural of a sample, for messages."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Files with these suffixes are of this kind, whatever they hold."""
    has_items: ClassVar[bool] = False
    """Whether the data are items of one shape, such as images; False for a stream of bytes."""
    presets: ClassVar[tuple[str, ...]] = ("text-small", "text-medium", "enwik8", "text-modern")
    """Model presets made for this kind."""
    takes_any_preset: ClassVar[bool] = False
    """Whether presets made for other kinds of streams are accepted too."""

    ending: ClassVar[str] = ".bin"
    """Suffix of a sample's file."""
    needs_ending: ClassVar[bool] = False
    """Whether a file of samples must have the suffix `ending`."""
    overview_name: ClassVar[str | None] = None
    """File with all samples of a folder, beside the file of each; None if there is none."""
    can_join: ClassVar[bool] = False
    """Whether `write_together` can write several samples to one file."""
    is_printed: ClassVar[bool] = False
    """Whether a single sample is printed as it is generated."""
    default_length: ClassVar[int | None] = None
    """Bytes of a sample unless given; None: up to the context."""

    prompt_example: ClassVar[str | None] = None
    """What to give instead of a prompt in words: "a sound, as in --prompt-file a.wav". None: prompts may be words."""
    prompt_options: ClassVar[tuple[str, ...]] = ()
    """Options of `longstride sample` for this kind alone that select a part of --prompt-file."""
    output_options: ClassVar[tuple[str, ...]] = ()
    """Options of `longstride sample` for this kind alone that change the files written."""

    examples: ClassVar[int] = 1
    """Sequences that `write_examples` is given."""
    letters_per_byte: ClassVar[int] = 3
    """Width of a byte in `spell`."""
    signs: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Signs of `spell` and what they stand for; a picture explains those that it shows."""

    # Files to bytes.

    @classmethod
    def plan(
        cls, source: Path, limit: Limit | None = None, join: bool = False, others: Sequence[str] = ()
    ) -> Plan:  # fmt: skip
        """Plans a store of a file or folder. With `join` the names of files do not decide splits. `others`: suffixes of
        other kinds."""
        raise NotImplementedError

    @classmethod
    def remark(cls, path: Path) -> str | None:
        """Returns what a user should know of a file that is read as this kind by a guess; None for nothing."""
        return None

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether a file without a known suffix is of this kind, by its content."""
        return False

    @classmethod
    def recognizes_folder(cls, folder: Path, paths: Sequence[Path]) -> bool:
        """Whether a folder with these files, none with a known suffix, is of this kind."""
        return False

    @classmethod
    def looked_for(cls) -> str:
        """Describes the files of this kind, for a message."""
        return f"{cls.label} ({', '.join(cls.suffixes)})" if cls.suffixes else cls.label

    @classmethod
    def describe_misnamed(cls, start: bytes) -> str | None:
        """For the first bytes of a file that needs another suffix: what it holds, and which suffix. None otherwise."""
        return None

    # What a sample looks like.

    @classmethod
    def check_form(cls, owner: str, item: Sequence[Any], rate: object) -> None:
        """Raises ValueError if a store of this kind cannot have this item and rate."""
        if item:
            raise ValueError(f"{owner}: item of {cls.name} must be empty, got {short_repr(list(item))}")
        if rate is not None:
            raise ValueError(f"{owner}: rate is for audio, got {short_repr(rate)} with {cls.name}")

    @classmethod
    def item_of_model(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The item that a model's embedding of these sizes is made for; empty if it is not for items of this kind."""
        return ()

    @classmethod
    def of_model(cls, owner: str, known: "DataKind | None", sizes: tuple[int, ...], embedding: str) -> Self:
        """This kind, for samples of a model. `known`: the data it was trained on; `sizes`: of its embedding."""
        return cls()

    def describe(self) -> str:
        """The data, for a message: "images of 32 x 32 x 3"."""
        return self.name

    # Bytes to files.

    def check_writer(self, owner: str) -> None:
        """Raises ValueError if a package that writing needs is missing. Called before samples are generated."""

    def write_sample(self, data: bytes, path: Path, scale: int = 1) -> None:
        """Writes one sample. `scale` enlarges images."""
        to_file(data, path)

    def write_together(
        self, samples: Sequence[bytes], path: Path, prompts: Sequence[bytes], originals: Sequence[bytes], scale: int = 1
    ) -> None:  # fmt: skip
        """Writes all samples to one file. `prompts`: the start of each. `originals`: the items that were completed, each as
        many times as there are samples of it."""
        assert len(samples) == 1, f"{self.name} does not join samples"
        self.write_sample(samples[0], path, scale)

    def write_examples(self, sequences: Bytes, folder: Path, stem: str) -> Path:
        """Writes [examples, context] bytes as a PNG, WAV or text file, which `plot run` draws. Returns its path.

        The default writes them as UTF-8.
        """
        path = folder / f"{stem}.txt"
        with atomic_path(path) as temporary:
            temporary.write_text(sequences.tobytes()[:EXAMPLE_BYTES].decode("utf-8", "replace"), encoding="utf-8")
        return path

    # Prompts.

    def read_prompts(self, owner: str, path: Path, context: int, options: Mapping[str, Any]) -> list[Prompt]:
        """Reads the prompts of a file or folder. `options`: the values of `prompt_options`.

        The default takes the file as it is, which a kind that converts its files must not.
        """
        if path.is_dir():
            raise ValueError(f"{owner}: prompt_file = {str(path)!r} is a folder; give a file in it")
        with path.open("rb") as file:
            return [Prompt(file.read(context))]  # No more is of use, and a device has no end.

    # What pictures show.

    def byte_label(self, byte: int) -> str:
        """A byte as people know it: a letter, or a number."""
        return str(byte)

    def spell_byte(self, byte: int) -> str:
        """A byte in at most `letters_per_byte` letters."""
        return f"{byte:02x}"

    def spell(self, tokens: Bytes, first: int, end: int, has_glyph: Callable[[str], bool]) -> str:
        """Bytes `first` to `end`, each in `letters_per_byte` letters. `has_glyph`: whether the font has a letter."""
        return "".join(f"{self.spell_byte(byte)} " for byte in tokens[first:end].tolist())

    def describe_place(self, tokens: Bytes, place: int, position: int, has_glyph: Callable[[str], bool]) -> str:
        """Where a byte is as seen from `position`, and what it is. Uses no byte from `position` on."""
        return f"{position - place:>5,} back  {tokens[place]}"

    def signal(self, tokens: Bytes) -> NDArray[np.float64] | None:
        """The bytes as a curve over time, `rate` values per second; None if they are not a signal."""
        return None


@contextmanager
def name_prompt_in_errors(owner: str, path: Path) -> Iterator[None]:
    """Turns errors about a file into errors about the argument prompt_file."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        what = text.removeprefix(str(path)) if text.startswith(f"{path} ") else f": {text}"
        raise ValueError(f"{owner}: prompt_file = {str(path)!r}{what}; give another") from None
