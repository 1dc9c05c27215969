"""How a command ends: with an exit code, and if anything is wrong with one line that says what."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import NoReturn

from longstride.common.checks import printable

BAD_INPUT, INTERRUPTED, UNREAD = 2, 130, 141
"""The last two as shells have them: 128 and the signal's number."""
NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "unable to mmap")
"""What PyTorch says on a CPU, in a plain RuntimeError."""


@contextmanager
def told_in_one_line(verb: str) -> Iterator[None]:
    try:
        try:
            yield
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # As rich ends where its table is not read to the end.
                raise end.__context__ from None
            _flush()
            raise
        _flush()
    except BrokenPipeError:  # Whoever reads has enough.
        _end(UNREAD, at_once=_is_joined())
    except (ValueError, OSError, FloatingPointError) as error:
        _end(BAD_INPUT, "" if _is_said(error) else str(error), at_once=_is_joined())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = next(iter(str(error).splitlines()), "") or "The machine has too little memory."
        more = "" if verb in ("eval", "sample") else "--accumulate, --model.recompute on, or "
        hint = f" Try {more}a smaller --batch." if verb in ("train", "eval", "sample", "demo") else ""
        _end(BAD_INPUT, f"{first}{hint}", at_once=_is_joined())
    except KeyboardInterrupt:
        # A checkpoint that is being written is not waited for: it is known as unfinished.
        _end(INTERRUPTED, "interrupted" if is_main_process() else "", at_once=_is_joined() or _threads_work())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had, of a GPU or of the machine."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def is_main_process() -> bool:
    """Whether this process prints: the only one, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def _ranks() -> ModuleType | None:
    """The module that joins processes, if anything has imported it: torch is not imported to find out."""
    return sys.modules.get("longstride.training.ranks")


def _is_joined() -> bool:
    ranks = _ranks()
    return ranks is not None and ranks.is_joined()


def _is_said(error: BaseException) -> bool:
    """Whether the first process prints this error, too."""
    ranks = _ranks()
    return ranks is not None and ranks.REPORTED in getattr(error, "__notes__", ())


def _threads_work() -> bool:
    """Whether there are threads that the end of the process would wait for."""
    return any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread())


def _flush() -> None:
    if sys.stdout is not None:  # As it is where it was closed.
        sys.stdout.flush()


def _end(code: int, line: str = "", *, at_once: bool) -> NoReturn:
    """At once: what waits for threads, or for other processes, is left as it is."""
    if line and sys.stderr is not None:
        with suppress(OSError):
            print(f"longstride: {printable(' '.join(line.splitlines()))}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            from longstride.common.console import silence

            silence(stream)
    if at_once:
        os._exit(code)
    sys.exit(code)
