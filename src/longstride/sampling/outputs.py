"""Output of samples: text on standard output, or text, images, sound or bytes in one file or one file per sample."""

import codecs
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longstride.common.atomic import check_output, check_writable
from longstride.common.console import silence
from longstride.common.files import check_run_folder
from longstride.data.kind import DataKind
from longstride.sampling.request import OWNER, Request
from longstride.training.source import Source

STEM = "sample"
"""The first part of the names of files that have none given."""


@dataclass(frozen=True)
class Output:
    """The files that samples are written to."""

    kind: DataKind
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
            self.kind.write_sample(sample, path, self.scale)
        if self.combined is not None:
            self.kind.write_together(samples, self.combined, prompts, originals, self.scale)

    def others(self, written: int) -> list[Path]:
        """The files in the folder that are named as samples are, and are not the first `written` ones of this call. They may
        be an earlier call's, or somebody else's: nothing says whose, so they are not removed."""
        own = {path.name for path in self.separate[:written]}
        named = re.compile(rf"{STEM}-\d+{re.escape(self.kind.ending)}")
        paths = self.location.iterdir() if self.separate else ()
        return sorted(path for path in paths if named.fullmatch(path.name) and path.name not in own)


def plan_output(request: Request, source: Source, kind: DataKind, total: int) -> Output | None:
    """Returns the files to write, or None for a single text, which is printed. ValueError if a file must not be replaced."""
    if request.out is None:
        if kind.is_printed and total == 1:
            return None
        of = f"-{source.checkpoint}" if source.checkpoint else ""
        folder = Path(".")
        if source.config is not None:
            check_run_folder(OWNER, source.folder)
            folder = source.folder
        output = Output(kind, folder / f"{STEM}{of}{kind.ending}", [], request.scale)
    elif request.out.is_dir() or not request.out.suffix:
        if request.out.exists() and not request.out.is_dir():
            raise ValueError(f"{OWNER}: out = {str(request.out)!r} is a file; a name without an ending is a folder's")
        digits = len(str(total - 1))
        separate = [request.out / f"{STEM}-{number:0{digits}}{kind.ending}" for number in range(total)]
        output = Output(kind, request.out / kind.overview_name if kind.overview_name else None, separate, request.scale)
    else:
        if kind.needs_ending and request.out.suffix.lower() != kind.ending:
            raise ValueError(
                f"{OWNER}: out = {str(request.out)!r} must end in {kind.ending}, or be a folder, for {kind.name}"
            )
        output = Output(kind, request.out, [], request.scale)
    if not kind.can_join and total > 1 and output.combined is not None:
        raise ValueError(
            f"{OWNER}: count = {total} of {kind.name} do not go into one file; give --out a folder, a name without an ending"
        )
    kind.check_writer(OWNER)
    _check_paths(output, may_replace=request.force or (request.out is None and source.config is not None))
    return output


def _check_paths(output: Output, may_replace: bool) -> None:
    """Raises ValueError, before the work, if a file cannot be written or must not be replaced."""
    paths = ([output.combined] if output.combined is not None else []) + output.separate
    if output.separate and not output.location.exists():
        check_writable(OWNER, "out", paths[0])  # Makes the folder.
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

    def write(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
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
