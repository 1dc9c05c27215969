"""Where samples go: text printed as it comes, or text, a sheet of images, sound or bytes in one file or a file for each."""

import codecs
import os
import stat
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

from longstride.common.atomic import check_output, check_writable
from longstride.common.console import silence
from longstride.common.files import check_run_folder
from longstride.data.audio import to_wav
from longstride.data.images import sheet, to_png
from longstride.data.plan import optional
from longstride.data.text import to_file
from longstride.sampling.request import OWNER, Request
from longstride.sampling.subject import Subject
from longstride.training.source import Source

ENDINGS = {"text": ".txt", "images": ".png", "audio": ".wav", "bytes": ".bin"}
ACROSS = 8
"""The most images in a row of a sheet."""
GREY, SILENCE = b"\x80", b"\x80"
PAUSE = 0.25
"""Seconds between two sounds of one file."""


@dataclass(frozen=True)
class Output:
    subject: Subject
    whole: Path | None
    """The file of all samples."""
    single: list[Path]
    """The files of each, if they have any."""
    scale: int = 1
    """Of images."""

    @property
    def place(self) -> Path:
        """What a person is told."""
        if self.single:
            return self.single[0].parent
        assert self.whole is not None
        return self.whole

    def write(self, samples: Sequence[bytes], prompts: Sequence[bytes], originals: Sequence[bytes]) -> None:
        """`samples` begin with their prompts; there may be fewer than were asked for."""
        for path, sample in zip(self.single, samples):
            self._write_one(sample, path)
        if self.whole is None:
            return
        if self.subject.kind == "images":
            shown, across = list(samples), min(ACROSS, ceil(sqrt(len(samples))))
            if originals:
                shown, across = side_by_side(samples, prompts, originals)
            sheet(b"".join(shown), self.subject.item, across, self.whole, scale=self.scale)
        elif self.subject.kind == "audio":
            to_wav((SILENCE * round(PAUSE * self.subject.rate)).join(samples), self.whole, self.subject.rate)
        elif self.subject.kind == "text" and len(samples) > 1:
            titled = [f"==== sample {number} ====\n{_text(sample)}\n" for number, sample in enumerate(samples)]
            to_file("\n".join(titled).encode(), self.whole)
        else:
            self._write_one(samples[0], self.whole)

    def _write_one(self, sample: bytes, path: Path) -> None:
        if self.subject.kind == "images":
            to_png(sample, self.subject.item, path, self.scale)
        elif self.subject.kind == "audio":
            to_wav(sample, path, self.subject.rate)
        else:
            to_file(_text(sample).encode() if self.subject.kind == "text" else sample, path)


def find_output(request: Request, source: Source, subject: Subject, total: int) -> Output | None:
    """None is for a text that is printed as it comes. Nothing that is there is replaced unless it may be."""
    ending = ENDINGS[subject.kind]
    if request.out is None:
        if subject.kind == "text" and total == 1:
            return None
        of = f"-{source.checkpoint}" if source.checkpoint else ""
        folder = Path(".")
        if source.config is not None:
            check_run_folder(OWNER, source.folder)
            folder = source.folder
        output = Output(subject, folder / f"sample{of}{ending}", [], request.scale)
    elif request.out.is_dir() or not request.out.suffix:
        if request.out.exists() and not request.out.is_dir():
            raise ValueError(f"{OWNER}: out = {str(request.out)!r} is a file; a name without an ending is a folder's")
        digits = len(str(total - 1))
        single = [request.out / f"sample-{number:0{digits}}{ending}" for number in range(total)]
        output = Output(subject, request.out / "sheet.png" if subject.kind == "images" else None, single, request.scale)
    else:
        if subject.kind in ("images", "audio") and request.out.suffix.lower() != ending:
            raise ValueError(f"{OWNER}: out = {str(request.out)!r} must end in {ending}, or be a folder, for {subject.kind}")
        output = Output(subject, request.out, [], request.scale)
    if subject.kind == "bytes" and total > 1 and output.whole is not None:
        raise ValueError(
            f"{OWNER}: count = {total} of bytes do not go into one file; give --out a folder, a name without an ending"
        )
    if subject.kind == "images":
        optional("PIL.Image", "sample: writing images")
    _check(output, may_replace=request.force or (request.out is None and source.config is not None))
    return output


def side_by_side(
    samples: Sequence[bytes], prompts: Sequence[bytes], originals: Sequence[bytes]
) -> tuple[list[bytes], int]:  # fmt: skip
    """A row for each image: the image, what was kept of it, and all that was made of that; and how long a row is."""
    count = len(prompts) // len(originals)
    shown: list[bytes] = []
    for number, original in enumerate(originals):
        here = slice(number * count, (number + 1) * count)
        empty = GREY * len(original)
        kept = prompts[number * count]
        row = [original, kept + empty[len(kept) :], *samples[here]]
        shown += row + [empty] * (2 + count - len(row))
    return shown, 2 + count


def _text(sample: bytes) -> str:
    return sample.decode("utf-8", "replace")


def _check(output: Output, may_replace: bool) -> None:
    """Before the work."""
    paths = ([output.whole] if output.whole is not None else []) + output.single
    if output.single and not output.place.exists() and output.place.parent.is_dir():
        check_writable(OWNER, "out", paths[0])  # The folder that was asked for.
    for path in paths:
        check_output(OWNER, "out", path, may_replace)


KEPT = "\n\t"
REPLACED = "\ufffd"


class Stream:
    """Writes UTF-8, whatever the terminal's settings. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self.open = sys.stdout is not None  # It is None where it was closed.
        self.unread = False
        """Whether the reader closed its end of the pipe."""
        self.terminal = self.open and sys.stdout.isatty()
        self.file = not self.open or stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
        """Or else a terminal, or a pipe, which may well lead to the same terminal as standard error."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._last = "\n"
        if self.open:
            sys.stdout.flush()

    @property
    def unfinished(self) -> bool:
        """Whether the last line has no end."""
        return self._last != "\n"

    @property
    def in_front_of_errors(self) -> bool:
        """Whether what standard error has next is seen right behind it."""
        if not self.open or sys.stderr is None:
            return False
        same = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
        return self.unfinished and (same or (sys.stderr.isatty() and not self.file))

    def write(self, some: bytes, final: bool = False) -> None:
        text = self._decoder.decode(some, final)
        if self.terminal:  # Else what a model has read would move the cursor, or worse.
            text = self._held + text
            self._held = "\r" if text.endswith("\r") and not final else ""  # Half of a line's end, perhaps.
            text = text[: len(text) - len(self._held)].replace("\r\n", "\n")
            text = "".join(REPLACED if unicodedata.category(x) == "Cc" and x not in KEPT else x for x in text)
        self._put(text)

    def close(self) -> None:
        self.write(b"", final=True)
        if self.terminal and self.unfinished:
            self._put("\n")

    def _put(self, text: str) -> None:
        if not text or not self.open:
            return
        self._last = text[-1]
        try:
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # Whoever reads has enough.
            self.open, self.unread = False, True
            silence(sys.stdout)
