"""Lock on a run's folder, for one process at a time. The system releases it when the process ends, for any reason."""

import fcntl
import os
import socket
from pathlib import Path

from longstride.common.atomic import add_path_to_errors
from longstride.common.files import LOCK_NAME, open_inside

NAME = LOCK_NAME
LONGEST = 1000
"""The most characters read of the holder's name."""


class Lock:
    """Held from construction until `release`, or until the object is garbage-collected."""

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
        except OSError as error:  # The file system has no locks.
            self.file.close()
            raise OSError(f"train: {folder} cannot be locked: {error.strerror}; give another --out") from None
        with add_path_to_errors(folder / NAME):
            self.file.truncate(0)
            self.file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self.file.flush()

    def release(self) -> None:
        self.file.close()
