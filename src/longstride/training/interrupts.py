"""Ctrl-C and SIGTERM during training: the current step is finished first, so that the checkpoint is complete."""

import signal
import sys
import threading
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST = 2.0
"""Seconds within which a second signal counts as the same request: a scheduler signals all processes, and torchrun forwards
the signal to them again."""


class Interrupts:
    """Context in which the first signal sets `requested`, and a second one raises KeyboardInterrupt."""

    def __init__(self, report: bool = True) -> None:
        """`report`: whether to print a message; only one of several processes does."""
        self.requested, self.report = False, report
        self.signal = int(signal.SIGTERM)
        """The signal that arrived, or SIGTERM if it arrived at another process."""
        self._since = 0.0
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # Other threads cannot set handlers.
            self._old_handlers = {caught: signal.signal(caught, self._handle) for caught in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for caught, handler in self._old_handlers.items():
            signal.signal(caught, handler)

    def mark_requested(self) -> None:
        """Records that another process got a signal. One that arrives here shortly after is the same request."""
        if not self.requested:
            self.requested, self._since = True, monotonic()

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self.requested and monotonic() - self._since > SAME_REQUEST:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested, self.signal, self._since = True, signal_number, monotonic()
        if self.report:
            print("longstride: finishing this step and saving; once more to stop at once", file=sys.stderr)
