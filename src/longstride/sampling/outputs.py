"""Where samples go: text printed as it comes, or text, a sheet of images, sound or bytes in one file or a file for each."""

import codecs
import os
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


@dataclass(frozen=True)
class Output:
    kind: DataKind
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
            self.kind.write_sample(sample, path, self.scale)
        if self.whole is not None:
            self.kind.write_together(samples, self.whole, prompts, originals, self.scale)


def find_output(request: Request, source: Source, kind: DataKind, total: int) -> Output | None:
    """None is for a text that is printed as it comes. Nothing that is there is replaced unless it may be."""
    if request.out is None:
        if kind.is_printed and total == 1:
            return None
        of = f"-{source.checkpoint}" if source.checkpoint else ""
        folder = Path(".")
        if source.config is not None:
            check_run_folder(OWNER, source.folder)
            folder = source.folder
        output = Output(kind, folder / f"sample{of}{kind.ending}", [], request.scale)
    elif request.out.is_dir() or not request.out.suffix:
        if request.out.exists() and not request.out.is_dir():
            raise ValueError(f"{OWNER}: out = {str(request.out)!r} is a file; a name without an ending is a folder's")
        digits = len(str(total - 1))
        single = [request.out / f"sample-{number:0{digits}}{kind.ending}" for number in range(total)]
        output = Output(kind, request.out / kind.overview_name if kind.overview_name else None, single, request.scale)
    else:
        if kind.needs_ending and request.out.suffix.lower() != kind.ending:
            raise ValueError(
                f"{OWNER}: out = {str(request.out)!r} must end in {kind.ending}, or be a folder, for {kind.name}"
            )
        output = Output(kind, request.out, [], request.scale)
    if not kind.can_join and total > 1 and output.whole is not None:
        raise ValueError(
            f"{OWNER}: count = {total} of {kind.name} do not go into one file; give --out a folder, a name without an ending"
        )
    kind.check_writer(OWNER)
    _check(output, may_replace=request.force or (request.out is None and source.config is not None))
    return output


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
