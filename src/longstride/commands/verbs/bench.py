"""longstride bench attention, bench sampling, bench tune"""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import tyro

from longstride.commands.bench.settings import AttentionBenchmark, SamplingBenchmark, TuneBenchmark


def bench_attention(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns, dense SDPA and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.commands.bench.attention import run

    _measure_and_draw(run, settings, "plot_times")


def bench_sampling(settings: Annotated[SamplingBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure the time per byte, ours and that of transformers. Example: longstride bench sampling --preset enwik8"""
    from longstride.commands.bench.sampling import run

    _measure_and_draw(run, settings, "plot_rates")


def bench_tune(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Search faster kernel settings for this GPU, and save them. Example: longstride bench tune --widths 64"""
    from longstride.commands.bench.tune import run

    run(settings)


def _measure_and_draw(run: Callable[[Any], Any], settings: AttentionBenchmark | SamplingBenchmark, plot: str) -> None:
    # Imported before the work, in case matplotlib is not installed.
    draw = None if settings.picture is None else getattr(import_module("longstride.pictures.benchmarks"), plot)
    rows = run(settings).rows
    if settings.json is not None:
        print(f"wrote {settings.json}")
    if draw is not None:
        draw(rows, settings.picture)
        print(f"wrote {settings.picture}")
