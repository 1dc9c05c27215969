"""longstride bench sampling"""

from typing import Annotated

import tyro

from longstride.commands.bench.settings import SamplingBenchmark

ORDER = 140


def main(settings: Annotated[SamplingBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure the time per byte, ours and that of transformers. Example: longstride bench sampling --preset enwik8"""
    from longstride.commands.bench.checks import check_sampling

    check_sampling(settings)

    from longstride.commands.bench.report import prepare_drawing
    from longstride.commands.bench.sampling import run

    draw = prepare_drawing(settings, "plot_rates")
    draw(run(settings).rows, settings.picture)
