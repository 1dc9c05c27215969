"""longstride data fetch"""

from pathlib import Path
from typing import Annotated

import tyro

ORDER = 50


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    folder: Path = Path("."),
    force: bool = False,
) -> None:
    """Download a data set and verify it; a second call resumes. Example: longstride data fetch enwik8

    Args:
        name: enwik8 or cifar10.
        folder: The folder for the download.
        force: Replace a file of that name that has other content.
    """
    from longstride.data.fetch import fetch

    print(f"wrote {fetch(name, folder, force=force)}")
