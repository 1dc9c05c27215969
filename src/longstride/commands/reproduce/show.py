"""Runs an experiment or reads its results, prints the table and draws the curves."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from longstride.commands.bench import memory
from longstride.commands.bench.memory_results import PAPER, read_memory, show_memory
from longstride.commands.bench.settings import MemoryBenchmark
from longstride.commands.reproduce.checks import TABLE_4
from longstride.commands.reproduce.experiments import EXPERIMENTS
from longstride.commands.reproduce.results import Reproduced, read_results
from longstride.commands.reproduce.runner import reproduce
from longstride.commands.reproduce.settings import Reproduction
from longstride.commands.reproduce.tables import show_results
from longstride.common.figures import new_figure

TINY_MEMORY = MemoryBenchmark(contexts=(64, 256), steps=2, device="cpu")


def run(experiment: str, settings: Reproduction, console: Console | None = None) -> None:
    console = console or Console()
    if settings.picture is not None:
        new_figure("reproduce", 1, 1)  # Fails early if matplotlib is missing.
    if experiment == TABLE_4:
        _table_4(settings, console)
        return
    if settings.read is not None:
        result = read_results(settings.read)
        if result.experiment != experiment:
            raise ValueError(f"reproduce: {settings.read} has {result.experiment}, and {experiment} is asked for")
        show_results(result, console)
        if settings.picture is not None:
            _draw(result, settings.picture)
        return
    result = reproduce(EXPERIMENTS[experiment], settings, console)
    assert settings.out is not None
    print(f"wrote {settings.out / f'{experiment}.json'}")
    if any(row.validation_steps for row in result.rows):
        try:
            _draw(result, settings.picture or settings.out / f"{experiment}.png")
        except ValueError as error:
            print(f"the curves are not drawn: {error}")


def _draw(result: Reproduced, path: Path) -> None:
    from longstride.pictures.reproduced import plot_curves

    plot_curves(result.rows, path, EXPERIMENTS[result.experiment].title)
    print(f"wrote {path}")


def _table_4(settings: Reproduction, console: Console) -> None:
    """`longstride bench memory` with the paper's contexts."""
    if settings.read is not None:
        result = read_memory(settings.read)
        show_memory(result, console)
    else:
        assert settings.out is not None
        settings.out.mkdir(parents=True, exist_ok=True)
        path = settings.out / f"{TABLE_4}.json"
        cases = TINY_MEMORY if settings.scale == "tiny" else MemoryBenchmark(device=settings.device)
        data = next(iter(settings.data), None)
        result = memory.run(replace(cases, steps=settings.steps or cases.steps, data=data, json=path), console)
        print(f"wrote {path}")
    picture = settings.picture or (None if settings.out is None else settings.out / f"{TABLE_4}.png")
    if picture is not None:
        from longstride.pictures.benchmarks import plot_memory

        plot_memory(result.rows, picture, result.limit_gib, PAPER)
        print(f"wrote {picture}")
