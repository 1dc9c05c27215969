"""longstride bench attention"""

from typing import Annotated

import tyro

from longstride.commands.bench.settings import AttentionBenchmark

ORDER = 130


def main(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns, dense SDPA and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.commands.bench.checks import check_attention

    check_attention(settings)

    from longstride.commands.bench.attention import run
    from longstride.commands.bench.report import prepare_drawing

    draw = prepare_drawing(settings, "plot_times")
    result = run(settings)
    draw(result.rows, settings.picture, result.on_gpu, result.crossings)
