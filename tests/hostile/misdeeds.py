"""What a reader must not do, done on purpose: the worker has to notice each."""

import ctypes
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np

from longstride.common.checks import whole_number
from longstride.data.audio import decode
from tests.hostile.containers import Harm
from tests.hostile.worker import Case


def spin() -> None:
    while True:
        pass


def write_too_much() -> None:
    with open("large", "wb") as file:
        file.seek(3 << 30)
        file.write(b"1")


def write_through_a_link() -> None:
    Path("link").symlink_to("../canary.txt")
    Path("link").write_text("changed")


def write_unseen() -> None:
    """As a library in C would: Python has no event for it."""
    ctypes.CDLL(None).truncate(b"../canary.txt", ctypes.c_long(0))


MISDEEDS: dict[str, tuple[Case, str]] = {
    "raises another error": (lambda: {}["x"], "KeyError"),
    "takes memory": (lambda: np.ones(3 << 30, np.uint8), "MemoryError"),
    "takes time": (spin, "takes too long"),
    "waits for ever": (lambda: os.read(os.pipe()[0], 1), "hangs"),
    "writes a large file": (write_too_much, "writes too much"),
    "crashes": (lambda: ctypes.string_at(0), "SIGSEGV"),
    "exits": (lambda: os._exit(0), "no report"),
    "unpickles": (lambda: pickle.loads(pickle.dumps(Harm())), "changes files outside of its folder"),
    "starts a program": (lambda: subprocess.run(["true"]), "subprocess.Popen"),
    "writes through a link": (write_through_a_link, "changes files outside of its folder"),
    "writes where Python does not see it": (write_unseen, "changes files outside of its folder"),
    "removes a file": (lambda: Path("../canary.txt").unlink(), "changes files outside of its folder"),
    "opens a file to write": (lambda: Path("../canary.txt").open("a").close(), "open outside of its folder"),
    "lets an error of a library pass": (lambda: decode("text"), "ValueError of a library, data/audio.py"),
    "says several lines": (lambda: whole_number("a\nb", "x", 0, 1), "a message of several lines, common/checks.py"),
    "says too much": (lambda: whole_number("a" * 2000, "x", 0, 1), "a message without end, common/checks.py"),
}
"""Each with what the reason of its failure begins with."""
