"""The table of presets: longstride presets"""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longstride.model.config import ModelConfig
from longstride.model.cost import cost
from longstride.model.presets import DENSE, PRESETS, preset

FOLDED_BELOW = 60
"""Width of a terminal below which all columns may be folded, so that nothing is cut off."""


def show(dense: bool = False, console: Console | None = None) -> None:
    """Prints the presets with their size, pattern and cost. `dense`: with their forms with full attention."""
    console = console or Console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    whole = console.width >= FOLDED_BELOW
    table.add_column("preset", no_wrap=whole, overflow="fold")
    table.add_column("million\nweights", justify="right", no_wrap=whole, overflow="fold")
    table.add_column("context", justify="right", no_wrap=whole, overflow="fold")
    table.add_column("pattern", overflow="fold")
    for unit in ("TFLOP", "GiB"):
        table.add_column(f"step\n{unit}", justify="right", no_wrap=whole, overflow="fold")
    for name in PRESETS:
        table.add_row(*_row(name, preset(name)))
        if dense:
            table.add_row(*_row(name + DENSE, preset(name + DENSE)))
    console.print(table)
    console.print(
        "A step is one sequence, forward and backward. Memory includes weights, gradients and Adam's averages; it is "
        "estimated, not measured.",
        highlight=False,
    )
    if not dense:
        console.print(f"Every name with {DENSE} has full attention instead; --dense lists these, too.", highlight=False)


def _row(name: str, config: ModelConfig) -> list[str]:
    estimate = cost(config)
    return [
        name,
        f"{estimate.parameters / 1e6:.1f}",
        f"{config.context:,}",
        config.pattern,
        _figures(estimate.flops / 1e12),
        _figures(estimate.memory / 2**30),
    ]


def _figures(x: float) -> str:
    """Formats with two or three significant digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}" if x >= 1 else f"{x:.2g}"
