"""A text on standard output as it comes: whole characters, at once."""

import codecs
import os
import sys
import unicodedata

KEPT = "\n\t"
REPLACED = "\ufffd"


class Stream:
    """Writes UTF-8, whatever the terminal's settings. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.open = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._last = "\n"
        sys.stdout.flush()

    def write(self, some: bytes, final: bool = False) -> None:
        text = self._decoder.decode(some, final)
        if self.terminal:  # Else what a model has read would move the cursor, or worse.
            text = "".join(REPLACED if unicodedata.category(x) == "Cc" and x not in KEPT else x for x in text)
        self._put(text)

    def close(self) -> None:
        self.write(b"", final=True)
        if self.terminal and self._last != "\n":
            self._put("\n")

    def _put(self, text: str) -> None:
        if not text or not self.open:
            return
        self._last = text[-1]
        try:
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # Whoever reads has enough. Python would complain once more as it ends.
            self.open = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
