"""Output of samples: text on standard output, or text, images, sound or bytes in one file or one file per sample."""

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
from longstride.sampling.format import SampleFormat
from longstride.sampling.request import OWNER, Request
from longstride.training.source import Source

ENDINGS = {"text": ".txt", "images": ".png", "audio": ".wav", "bytes": ".bin"}
ACROSS = 8
"""The most images in a row of a sheet."""
GREY, SILENCE = b"\x80", b"\x80"
PAUSE = 0.25
"""Seconds of silence between the sounds of one file."""


@dataclass(frozen=True)
class Output:
    """The files that samples are written to."""

    sample_format: SampleFormat
    combined: Path | None
    """The file with all samples, if there is one."""
    separate: list[Path]
    """One file per sample, if they have their own."""
    scale: int = 1
    """Magnification of images."""

    @property
    def location(self) -> Path:
        """The file or folder to name in messages."""
        if self.separate:
            return self.separate[0].parent
        assert self.combined is not None
        return self.combined

    def write(self, samples: Sequence[bytes], prompts: Sequence[bytes], originals: Sequence[bytes]) -> None:
        """Writes samples, which begin with their prompts. An interruption may leave fewer than planned."""
        for path, sample in zip(self.separate, samples):
            self._write_sample(sample, path)
        if self.combined is None:
            return
        if self.sample_format.kind == "images":
            shown, across = list(samples), min(ACROSS, ceil(sqrt(len(samples))))
            if originals:
                shown, across = completion_rows(samples, prompts, originals)
            sheet(b"".join(shown), self.sample_format.item, across, self.combined, scale=self.scale)
        elif self.sample_format.kind == "audio":
            to_wav((SILENCE * round(PAUSE * self.sample_format.rate)).join(samples), self.combined, self.sample_format.rate)
        elif self.sample_format.kind == "text" and len(samples) > 1:
            titled = [f"==== sample {number} ====\n{_text(sample)}\n" for number, sample in enumerate(samples)]
            to_file("\n".join(titled).encode(), self.combined)
        else:
            self._write_sample(samples[0], self.combined)

    def _write_sample(self, sample: bytes, path: Path) -> None:
        if self.sample_format.kind == "images":
            to_png(sample, self.sample_format.item, path, self.scale)
        elif self.sample_format.kind == "audio":
            to_wav(sample, path, self.sample_format.rate)
        else:
            to_file(_text(sample).encode() if self.sample_format.kind == "text" else sample, path)


def plan_output(request: Request, source: Source, sample_format: SampleFormat, total: int) -> Output | None:
    """Returns the files to write, or None for a single text, which is printed. ValueError if a file must not be replaced."""
    ending = ENDINGS[sample_format.kind]
    if request.out is None:
        if sample_format.kind == "text" and total == 1:
            return None
        of = f"-{source.checkpoint}" if source.checkpoint else ""
        folder = Path(".")
        if source.config is not None:
            check_run_folder(OWNER, source.folder)
            folder = source.folder
        output = Output(sample_format, folder / f"sample{of}{ending}", [], request.scale)
    elif request.out.is_dir() or not request.out.suffix:
        if request.out.exists() and not request.out.is_dir():
            raise ValueError(f"{OWNER}: out = {str(request.out)!r} is a file; a name without an ending is a folder's")
        digits = len(str(total - 1))
        separate = [request.out / f"sample-{number:0{digits}}{ending}" for number in range(total)]
        output = Output(
            sample_format, request.out / "sheet.png" if sample_format.kind == "images" else None, separate, request.scale
        )
    else:
        if sample_format.kind in ("images", "audio") and request.out.suffix.lower() != ending:
            raise ValueError(
                f"{OWNER}: out = {str(request.out)!r} must end in {ending}, or be a folder, for {sample_format.kind}"
            )
        output = Output(sample_format, request.out, [], request.scale)
    if sample_format.kind == "bytes" and total > 1 and output.combined is not None:
        raise ValueError(
            f"{OWNER}: count = {total} of bytes do not go into one file; give --out a folder, a name without an ending"
        )
    if sample_format.kind == "images":
        optional("PIL.Image", "sample: writing images")
    _check_paths(output, may_replace=request.force or (request.out is None and source.config is not None))
    return output


def completion_rows(
    samples: Sequence[bytes], prompts: Sequence[bytes], originals: Sequence[bytes]
) -> tuple[list[bytes], int]:  # fmt: skip
    """Returns the images of a sheet and its columns. A row has an original, the part that was kept, and its completions."""
    count = len(prompts) // len(originals)
    shown: list[bytes] = []
    for number, original in enumerate(originals):
        here = slice(number * count, (number + 1) * count)
        empty = GREY * len(original)
        prompt = prompts[number * count]
        row = [original, prompt + empty[len(prompt) :], *samples[here]]
        shown += row + [empty] * (2 + count - len(row))
    return shown, 2 + count


def _text(sample: bytes) -> str:
    return sample.decode("utf-8", "replace")


def _check_paths(output: Output, may_replace: bool) -> None:
    """Raises ValueError, before the work, if a file cannot be written or must not be replaced."""
    paths = ([output.combined] if output.combined is not None else []) + output.separate
    if output.separate and not output.location.exists() and output.location.parent.is_dir():
        check_writable(OWNER, "out", paths[0])  # Creates the folder.
    for path in paths:
        check_output(OWNER, "out", path, may_replace)


ALLOWED_CONTROLS = "\n\t"
REPLACED = "\ufffd"


class StandardOutput:
    """Prints text as its bytes arrive, in UTF-8 whatever the locale. Invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self.open = sys.stdout is not None  # None if it was closed.
        self.reader_closed = False
        """Whether the reader closed its end of the pipe."""
        self.terminal = self.open and sys.stdout.isatty()
        self.file = not self.open or stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
        """Whether it is a file. A terminal or a pipe may show the text beside standard error."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._last = "\n"
        if self.open:
            sys.stdout.flush()

    @property
    def unfinished(self) -> bool:
        """Whether the last line has no newline yet."""
        return self._last != "\n"

    @property
    def precedes_stderr(self) -> bool:
        """Whether the next line on standard error would appear in the middle of a line of text."""
        if not self.open or sys.stderr is None:
            return False
        same = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
        return self.unfinished and (same or (sys.stderr.isatty() and not self.file))

    def write(self, some: bytes, final: bool = False) -> None:
        text = self._decoder.decode(some, final)
        if self.terminal:  # Control characters from the model must not reach the terminal.
            text = self._held + text
            self._held = "\r" if text.endswith("\r") and not final else ""  # Perhaps the first half of "\r\n".
            text = text[: len(text) - len(self._held)].replace("\r\n", "\n")
            text = "".join(REPLACED if unicodedata.category(x) == "Cc" and x not in ALLOWED_CONTROLS else x for x in text)
        self._print(text)

    def close(self) -> None:
        self.write(b"", final=True)
        if self.terminal and self.unfinished:
            self._print("\n")

    def _print(self, text: str) -> None:
        if not text or not self.open:
            return
        self._last = text[-1]
        try:
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # The reader has closed the pipe.
            self.open, self.reader_closed = False, True
            silence(sys.stdout)
