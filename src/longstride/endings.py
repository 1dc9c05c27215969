"""How a command ends: with an exit code, and if anything is wrong with one line that says what."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from longstride.training.ranks import SAID, is_joined

BAD_INPUT, INTERRUPTED, UNREAD = 2, 130, 141
"""The last two as shells have them: 128 and the signal's number."""


@contextmanager
def told_in_one_line(verb: str) -> Iterator[None]:
    try:
        yield
        _flush()
    except SystemExit:
        _flush()
        raise
    except BrokenPipeError:  # Whoever reads has enough. Python would complain once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _end(UNREAD, at_once=is_joined())
    except (ValueError, OSError, FloatingPointError) as error:
        if SAID not in getattr(error, "__notes__", ()):
            print(f"longstride: {error}", file=sys.stderr)
        _end(BAD_INPUT, at_once=is_joined())
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        first = str(error).splitlines()[0]
        more = "" if verb in ("eval", "sample") else "--accumulate, --model.recompute on, or "
        print(f"longstride: {first} Try {more}a smaller --batch.", file=sys.stderr)
        _end(BAD_INPUT, at_once=is_joined())
    except KeyboardInterrupt:
        if speaks():
            print("longstride: interrupted", file=sys.stderr)
        # A checkpoint that is being written is not waited for: it is known as unfinished.
        _end(INTERRUPTED, at_once=is_joined() or _threads_work())


def speaks() -> bool:
    """Of several processes one does."""
    return os.environ.get("RANK", "0") == "0"


def _threads_work() -> bool:
    """Whether there are threads that the end of the process would wait for."""
    return any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread())


def _flush() -> None:
    if sys.stdout is not None:  # As it is where it was closed.
        sys.stdout.flush()


def _end(code: int, at_once: bool) -> NoReturn:
    """At once: what waits for threads, or for other processes, is left as it is."""
    _flush()
    sys.stderr.flush()
    if at_once:
        os._exit(code)
    sys.exit(code)
