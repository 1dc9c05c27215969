"""Progress of a run: one live line on a terminal, plain lines elsewhere, and optionally TensorBoard."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from longstride.common.console import StandardError, count, duration


class Reporter:
    """Shows the progress of a run."""

    def __init__(self, steps: int, start: int, folder: Path, tensorboard: bool, console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or StandardError()
        self.live: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.completed}/{task.total}"), BarColumn(10), TextColumn("{task.fields[line]}"))
            self.live = Progress(*columns, console=self.console)
            self.task = self.live.add_task("train", total=steps, completed=start, line="")
        self.board: Any = None
        if tensorboard:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> "Reporter":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()
        if self.board is not None:
            self.board.close()

    def advance(self, step: int) -> None:
        if self.live is not None:
            self.live.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        line = describe(row)
        if self.live is not None:
            self.live.update(self.task, completed=row["step"], line=line)
        else:
            self.console.print(f"step {row['step']}/{self.steps}  {line}", highlight=False, soft_wrap=True)
        self.board_row(row)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def board_row(self, row: dict[str, Any]) -> None:
        if self.board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, row["step"])


def check_tensorboard() -> None:
    """Raises ValueError if TensorBoard is not installed. Call it before a run begins."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise ValueError("train: --tensorboard needs the package: pip install tensorboard") from None


def describe(row: dict[str, Any]) -> str:
    """Formats a row of metrics as a short line, the most important values first."""
    return "  ".join(show(row[name]) for name, show in SHOWN.items() if row.get(name) is not None)


SHOWN: dict[str, Callable[[float], str]] = {
    "bits_per_byte": lambda x: f"{x:.3f} bits/byte",
    "valid_bits_per_byte": lambda x: f"validation {x:.3f}",
    "seconds_left": lambda x: f"{duration(x)} left",
    "bytes_per_second": lambda x: f"{count(x)}B/s",
    "matrix_share": lambda x: f"{100 * x:.0f} % matrix",
    "memory_gib": lambda x: f"{x:.1f} GiB",
    "gradient_norm": lambda x: f"gradient {x:.2f}",
    "loss_scale": lambda x: f"scale {x:g}",
}
"""matrix_share is relative to the device's measured rate for a large matrix product."""
