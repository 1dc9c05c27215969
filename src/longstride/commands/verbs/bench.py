"""longstride bench attention, bench sampling, bench tune"""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import tyro

from longstride.commands.bench.settings import AttentionBenchmark, SamplingBenchmark, TuneBenchmark


def bench_attention(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns, dense SDPA and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.commands.bench.attention import run

    draw = _drawing(settings, "plot_times")
    result = run(settings)
    draw(result.rows, settings.picture, result.on_gpu, result.crossings)


def bench_sampling(settings: Annotated[SamplingBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure the time per byte, ours and that of transformers. Example: longstride bench sampling --preset enwik8"""
    from longstride.commands.bench.sampling import run

    draw = _drawing(settings, "plot_rates")
    draw(run(settings).rows, settings.picture)


def bench_tune(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Search faster kernel settings for this GPU, and save them. Example: longstride bench tune --widths 64"""
    from longstride.commands.bench.tune import run

    run(settings)


def _drawing(settings: AttentionBenchmark | SamplingBenchmark, plot: str) -> Callable[..., None]:
    """Returns a function that draws the results, if a picture is asked for, and names the files that were written.

    Called before the measurement, which would be lost if matplotlib is not installed.
    """
    write = None if settings.picture is None else getattr(import_module("longstride.pictures.benchmarks"), plot)

    def draw(*results: Any) -> None:
        if settings.json is not None and getattr(settings, "read", None) is None:
            print(f"wrote {settings.json}")
        if write is not None:
            write(*results)
            print(f"wrote {settings.picture}")

    return draw
