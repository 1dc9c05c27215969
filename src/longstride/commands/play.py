"""Opens the page on a model that comes with longstride, or on a run: longstride play"""

import webbrowser
from pathlib import Path

from longstride.commands.serve import serve
from longstride.common.console import StandardError, print_line
from longstride.model.saved_config import find_settings
from longstride.model.shipped import NAMES, is_here, why_absent
from longstride.serving.settings import ServeSettings

OWNER = "play"


def play(folder: Path | None, settings: ServeSettings, browser: bool = True) -> None:
    """Serves the model until Ctrl-C, and opens a browser on its page."""
    folder = Path(_first_here()) if folder is None else folder
    find_settings(OWNER, folder)

    def show(address: str) -> None:
        if not browser or not webbrowser.open(address):
            print_line(StandardError(), f"open {address} in a browser; Ctrl-C ends the server")

    serve(folder, settings, show)


def _first_here() -> str:
    name = next(filter(is_here, NAMES), None)
    if name is None:
        first = next(iter(NAMES))
        raise ValueError(f"{OWNER}: give a run or a saved model; the model {first} is not here: {why_absent(first)}")
    return name
