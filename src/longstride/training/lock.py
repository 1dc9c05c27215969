"""One run at a time in a folder. The lock goes when its process does, however that ends."""

import fcntl
import os
import socket
from pathlib import Path

from longstride.common.files import open_inside

NAME = ".lock"
LONGEST = 1000
"""Characters that are read of who holds it."""


class Lock:
    """Held from when it is made until `release`, or until it is forgotten."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = os.fdopen(open_inside(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read(LONGEST).split("\n")[0].strip() or "another process"
            self.file.close()
            raise ValueError(f"train: {folder} is in use by {holder}; wait for it, or give another --out") from None
        except OSError as error:  # Of file systems that have no locks.
            self.file.close()
            raise OSError(f"train: {folder} cannot be locked: {error.strerror}; give another --out") from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.file.flush()

    def release(self) -> None:
        self.file.close()
