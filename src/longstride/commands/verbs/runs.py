"""longstride runs"""

from pathlib import Path
from typing import Annotated

import tyro

ORDER = 70


def main(folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path(".")) -> None:
    """List runs with their step, best bits per byte and state, newest first. Example: longstride runs

    Args:
        folder: The folder to search, two levels deep.
    """
    from longstride.commands.runs import show_runs

    show_runs(folder)
