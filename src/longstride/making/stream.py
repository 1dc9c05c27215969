"""A text on standard output as it comes: whole characters, at once."""

import codecs
import os
import stat
import sys
import unicodedata

from longstride.standard import silence

KEPT = "\n\t"
REPLACED = "\ufffd"


class Stream:
    """Writes UTF-8, whatever the terminal's settings. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self.open = sys.stdout is not None  # It is None where it was closed.
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
            self.open = False
            silence(sys.stdout)
