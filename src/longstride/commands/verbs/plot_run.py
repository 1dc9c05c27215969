"""longstride plot run"""

from pathlib import Path
from typing import Annotated

import tyro

ORDER = 100


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")],
    out: Path | None = None,
    force: bool = False,
) -> None:
    """Draw a run on one page: curves, settings, samples; or compare several. Example: longstride plot run RUN

    Args:
        runs: The run's folder. Several runs are compared: their curves, and the settings that differ.
        out: The picture to write, PNG or SVG by its ending; by default page.png in the run, or runs.png here for several.
        force: Replace a file that exists.
    """
    from longstride.common.figures import picture_path
    from longstride.common.files import check_run_folder
    from longstride.training.metrics import check_has_metrics

    if out is not None:
        picture_path("plot run", out)
    elif len(runs) == 1:
        check_run_folder("plot run", runs[0])
    for folder in runs:
        check_has_metrics(folder)

    from longstride.pictures.run import plot_run

    print(f"wrote {plot_run(runs, out, force)}")
