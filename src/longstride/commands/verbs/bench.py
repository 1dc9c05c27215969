"""longstride bench attention, bench sampling, bench tune"""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import tyro

from longstride.commands.bench.settings import AttentionBenchmark, SamplingBenchmark, TuneBenchmark


def bench_attention(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns beside SDPA dense and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.commands.bench.attention import run

    draw = _drawing(settings, "plot_times")
    result = run(settings)
    draw(result.rows, settings.picture, result.on_gpu, result.crossings)


def bench_sampling(settings: Annotated[SamplingBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure the time of a byte beside transformers and its floor. Example: longstride bench sampling --preset enwik8"""
    from longstride.commands.bench.sampling import run

    draw = _drawing(settings, "plot_rates")
    draw(run(settings).rows, settings.picture)


def bench_tune(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Find the kernels' settings anew for this GPU, and save the faster ones. Example: longstride bench tune --widths 64"""
    from longstride.commands.bench.tune import run

    run(settings)


def _drawing(settings: AttentionBenchmark | SamplingBenchmark, plot: str) -> Callable[..., None]:
    """The function that draws results, or one that does nothing if no picture is asked for. Called before the measurement,
    which would be lost if matplotlib is not installed."""
    if settings.picture is None:
        return lambda *_: None
    write = getattr(import_module("longstride.pictures.benchmarks"), plot)

    def draw(*results: Any) -> None:
        write(*results)
        print(f"wrote {settings.picture}")

    return draw
