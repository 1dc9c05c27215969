"""longstride bench step"""

from typing import Annotated

import tyro

from longstride.commands.bench.settings import StepBenchmark

ORDER = 132


def main(settings: Annotated[StepBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure training steps, ours and plain PyTorch's. Example: longstride bench step --cases enwik8 enwik8-dense"""
    from longstride.commands.bench.step_cases import check_step

    check_step(settings)

    from longstride.commands.bench.report import check_some_ran, prepare_drawing
    from longstride.commands.bench.step import run

    draw = prepare_drawing(settings, "plot_steps")
    result = run(settings)
    draw(result.rows, settings.picture)
    check_some_ran("bench step", [row.failure for row in result.rows])
