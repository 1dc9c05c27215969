"""longstride play"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.serving.settings import ServeSettings

ORDER = 94


def main(
    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN_OR_MODEL]")] = None,
    port: int = 0,
    browser: bool = True,
    device: str = "auto",
    streams: int | None = None,
) -> None:
    """Open the page on a model: write with it, see what it found likely and where it looked. Example: longstride play RUN

    Args:
        folder: A run, a saved model, or the name of a model that comes with longstride. Left out: the first of those that is
            here.
        port: Port to listen on; 0 takes a free one.
        browser: Open a browser; with --no-browser only the address is printed.
        device: Auto is the GPU if there is one.
        streams: Samples made at once. Left out: 64, or as many as a quarter of the memory is for, on a CPU at most 1 GiB.
    """
    from longstride.commands.play import play as run

    settings = ServeSettings(port=port, device=device, streams=streams, overflow="slide")
    settings.check()
    run(folder, settings, browser)
