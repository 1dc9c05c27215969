"""Ctrl-C, and a scheduler's request to end: the step that is under way is finished first, so that what is saved is whole."""

import signal
import sys
import threading
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE = 2.0
"""Seconds in which another signal is the same request: schedulers send it to all processes, and torchrun hands it on."""


class Interrupts:
    """While it lasts, `asked` says whether one of the signals has come, to any process. A second one ends it at once."""

    def __init__(self, speaks: bool = True) -> None:
        """`speaks`: of several processes one does."""
        self.asked, self.speaks = False, speaks
        self.signal = int(signal.SIGTERM)
        """Which one has come; that of schedulers if it came to another process."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Others may not set handlers.
            self._before = {one: signal.signal(one, self._ask) for one in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def hear(self) -> None:
        """Another process was asked. If this one is, too, in a moment, that is the same request."""
        if not self.asked:
            self.asked, self._since = True, monotonic()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and monotonic() - self._since > ONE:
            raise KeyboardInterrupt
        if self.asked:
            return
        self.asked, self.signal, self._since = True, number, monotonic()
        if self.speaks:
            print("longstride: finishing this step and saving; once more to stop at once", file=sys.stderr)
