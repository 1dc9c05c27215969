"""Exit codes of the command line. Every failure that a user can cause or mend is one line on standard error."""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import IO, Any, NoReturn

from longstride.commands.interrupts import INTERRUPTED, raise_on_interrupt
from longstride.common.checks import printable
from longstride.common.out_of_memory import is_out_of_memory

BAD_INPUT, BROKEN_PIPE = 2, 141
SIGNAL_BASE = 128
"""Shells add this to a signal's number: 130 for SIGINT, 141 for SIGPIPE, 143 for SIGTERM."""

_ROOM, _RIGHTS = "free some space, or choose another place", "change its permissions, or choose another place"
REMEDIES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "choose another place",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
}
"""What to do about an error of the system, by its number."""


@contextmanager
def exit_with_message(verb: str) -> Iterator[None]:
    """Context that turns errors of the verb into one line on standard error and an exit code.

    ValueError, OSError, FloatingPointError and a lack of memory exit with 2, Ctrl-C with 130, and output that nobody reads
    with 141. Other exceptions are our mistakes and keep their traceback.
    """
    try:
        try:
            raise_on_interrupt(True)
            yield
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich exits where its output is not read to the end.
                raise end.__context__ from None
            _flush()
            raise
        finally:
            raise_on_interrupt(False)
        _flush()
        _flush_or_silence(sys.stderr)  # What it does not take is no failure of the verb.
    except BrokenPipeError:
        _exit(BROKEN_PIPE, at_once=_is_joined())
    except (ValueError, OSError, FloatingPointError) as error:
        _exit(BAD_INPUT, "" if _is_reported(error) else _message(error), at_once=_is_joined())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = next(iter(str(error).splitlines()), "") or "The machine has too little memory."
        more = "" if verb in ("eval", "sample") else "--accumulate, --model.recompute on, or "
        hint = f" Try {more}a smaller --batch." if verb in ("train", "eval", "sample", "demo") else ""
        if advice := getattr(error, "advice", ""):
            hint = f"{'' if first.endswith('.') else '.'} {advice}"
        _exit(BAD_INPUT, f"{first}{hint}", at_once=_is_joined())
    except KeyboardInterrupt:
        # Does not wait for a checkpoint in progress: it stays marked as unfinished.
        _exit(INTERRUPTED, "interrupted" if is_main_process() else "", at_once=_is_joined() or _has_threads())


def is_main_process() -> bool:
    """Whether this process prints: the only one, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def is_only_process() -> bool:
    """Whether torchrun started no other processes, which would print the same error."""
    return os.environ.get("WORLD_SIZE", "1") == "1"


def is_restarted() -> bool:
    """Whether torchrun has started this process anew after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _ranks() -> ModuleType | None:
    """The module of distributed training, if it has been imported. Importing it here would import torch."""
    return sys.modules.get("longstride.training.ranks")


def _is_joined() -> bool:
    """Whether this process is connected to other processes, for which a normal exit would wait."""
    ranks = _ranks()
    return ranks is not None and ranks.in_process_group()


def _is_reported(error: BaseException) -> bool:
    """Whether another process prints this error."""
    ranks = _ranks()
    return ranks is not None and ranks.REPORTED in getattr(error, "__notes__", ())


def _has_threads() -> bool:
    """Whether threads are running for which a normal exit would wait."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _message(error: Exception) -> str:
    """The error's message, with a remedy for those of the system. A full disk's names no file: standard output is named if
    that cannot be written."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    message = str(error)
    if error.filename is None:
        try:
            _flush()
        except OSError as again:
            if again.errno == error.errno:
                message = f"{error}: standard output"
    return f"{message}; {REMEDIES[error.errno]}" if error.errno in REMEDIES else message


def _flush() -> None:
    if sys.stdout is not None:  # None if it was closed.
        sys.stdout.flush()


def _flush_or_silence(stream: IO[Any] | None) -> None:
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        from longstride.common.console import silence

        silence(stream)


def _exit(code: int, line: str = "", *, at_once: bool) -> NoReturn:
    """Prints the line and exits. `at_once`: without waiting for threads and other processes."""
    if line and sys.stderr is not None:
        with suppress(OSError):
            print(f"longstride: {printable(' '.join(line.splitlines()))}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        _flush_or_silence(stream)
    if at_once:
        os._exit(code)
    sys.exit(code)
