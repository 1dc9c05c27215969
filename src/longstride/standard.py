"""Standard output and error, which may be closed, or have nobody left who reads them."""

import io
import os
import sys
from typing import IO, Any

from rich.console import Console


def silence(stream: IO[Any]) -> None:
    """What waits in its buffer, and what comes, goes nowhere. Else Python would try once more as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StandardError(Console):
    """Where people see how far it is. If nobody reads it any more, the work goes on."""

    def __init__(self) -> None:
        super().__init__(file=sys.stderr or io.StringIO())  # It is None where it was closed.

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)
