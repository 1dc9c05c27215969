"""Ctrl-C from the first moment. Imports little: whatever is imported before `quit_on_interrupt` runs is not covered."""

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""The exit code, as shells have it: 128 and the signal's number."""
LINE = b"longstride: interrupted\n"
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


def quit_on_interrupt() -> None:
    """Makes SIGINT end the process at once. Does nothing if SIGINT is ignored, as in jobs in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def raise_on_interrupt(on: bool) -> None:
    """Switches between KeyboardInterrupt, for code that catches it, and the end at once. Needs `quit_on_interrupt` before:
    as a library, this package leaves signals alone."""
    if signal.getsignal(signal.SIGINT) in (_quit, _raise):
        signal.signal(signal.SIGINT, _raise if on else _quit)


def _quit(signal_number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":  # Of the processes that torchrun starts, one prints.
        try:  # noqa: SIM105 (contextlib would be one more import before the first moment)
            os.write(2, LINE)
        except OSError:  # Standard error is closed.
            pass
    os._exit(INTERRUPTED)


def _raise(signal_number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but not inside an import: extension modules such as PyTorch's turn it into other errors,
    or abort."""
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename == IMPORT_SYSTEM:
            _quit(signal_number, frame)
        outer = outer.f_back
    raise KeyboardInterrupt
