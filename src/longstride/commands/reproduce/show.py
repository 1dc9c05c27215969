"""Runs an experiment or reads its results, prints the table and draws the curves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from longstride.commands.bench import memory
from longstride.commands.bench.memory_results import PAPER, read_memory, show_memory
from longstride.commands.bench.settings import MemoryBenchmark
from longstride.commands.reproduce.checks import TABLE_4
from longstride.commands.reproduce.experiments import EXPERIMENTS
from longstride.commands.reproduce.results import read_results
from longstride.commands.reproduce.runner import reproduce
from longstride.commands.reproduce.settings import Reproduction
from longstride.commands.reproduce.tables import FEW, by_context, show_results
from longstride.common.figures import new_figure

Draw = Callable[[Path], None]
"""Draws the results."""
TINY_MEMORY = MemoryBenchmark(contexts=(64, 256), steps=2, device="cpu")


def run(experiment: str, settings: Reproduction, console: Console | None = None) -> None:
    """Prints the table, and names the files that were written."""
    console = console or Console()
    if settings.picture is not None:
        new_figure("reproduce", 1, 1)  # Fails early if matplotlib is missing.
    draw = (_table_4 if experiment == TABLE_4 else _trained)(experiment, settings, console)
    path = settings.picture
    if settings.read is None and settings.out is not None:
        print(f"wrote {settings.out / f'{experiment}.json'}")
        path = path or settings.out / f"{experiment}.png"
    if path is None:
        return
    try:
        draw(path)
        print(f"wrote {path}")
    except (ValueError, ModuleNotFoundError) as error:
        if settings.picture is not None:
            raise
        print(f"the picture is not drawn: {error}")


def _trained(experiment: str, settings: Reproduction, console: Console) -> Draw:
    """Trains the rows of an experiment, or reads their results."""
    if settings.read is None:
        result = reproduce(EXPERIMENTS[experiment], settings, console)
    else:
        result = read_results(settings.read, experiment)
        show_results(result, console)

    def draw(path: Path) -> None:
        from longstride.pictures.reproduced import plot_contexts, plot_curves

        about = EXPERIMENTS[experiment]
        if len(about.min_contexts) > FEW:
            plot_contexts(*by_context(about, result), path, about.title)
        else:
            plot_curves(result.rows, path, about.title)

    return draw


def _table_4(experiment: str, settings: Reproduction, console: Console) -> Draw:
    """`longstride bench memory` with the paper's contexts, or its results."""
    if settings.read is not None:
        result = read_memory(settings.read)
        show_memory(result, console)
    else:
        assert settings.out is not None
        settings.out.mkdir(parents=True, exist_ok=True)
        cases = TINY_MEMORY if settings.scale == "tiny" else MemoryBenchmark(device=settings.device)
        steps, data, path = (
            settings.steps or cases.steps,
            next(iter(settings.data), None),
            settings.out / f"{experiment}.json",
        )
        result = memory.run(replace(cases, steps=steps, data=data, json=path, force=True), console)

    def draw(path: Path) -> None:
        from longstride.pictures.benchmarks import plot_memory

        plot_memory(result.rows, path, result.limit_gib, PAPER)

    return draw
