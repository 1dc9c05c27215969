"""longstride bench memory"""

from typing import Annotated

import tyro

from longstride.commands.bench.settings import MemoryBenchmark

ORDER = 134


def main(settings: Annotated[MemoryBenchmark, tyro.conf.arg(name="")]) -> None:
    """Train long contexts inside a given memory. Example: longstride bench memory --gpu-memory 16GB"""
    from longstride.commands.bench.memory_cases import check_memory_settings

    check_memory_settings(settings)

    from longstride.commands.bench.memory import run
    from longstride.commands.bench.memory_results import PAPER
    from longstride.commands.bench.report import check_some_ran, prepare_drawing

    draw = prepare_drawing(settings, "plot_memory")
    result = run(settings)
    draw(result.rows, settings.picture, result.limit_gib, PAPER)
    check_some_ran("bench memory", [row.failure for row in result.rows])
