"""longstride bench tune"""

from typing import Annotated

import tyro

from longstride.commands.bench.settings import TuneBenchmark

ORDER = 150


def main(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Search faster kernel settings for this GPU, and save them. Example: longstride bench tune --widths 64"""
    from longstride.commands.bench.tune import run

    run(settings)
