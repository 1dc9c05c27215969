"""Reports of a run: the line for a row of metrics, TensorBoard, and the Summary that `train` returns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from longstride.common.console import format_count, format_duration

DONE, INTERRUPTED = "all steps are done", "interrupted"
"""Reasons why a run ended."""


class TensorBoard:
    """Writes rows of metrics for TensorBoard, in a run's folder; does nothing if it is not enabled."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self.writer: Any = None
        if enabled:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def add(self, row: dict[str, Any]) -> None:
        if self.writer is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(name, value, row["step"])


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
    "seconds_left": lambda x: f"{format_duration(x)} left",
    "bytes_per_second": lambda x: f"{format_count(x)}B/s",
    "matrix_share": lambda x: f"{100 * x:.0f} % matrix",
    "memory_gib": lambda x: f"{x:.1f} GiB",
    "gradient_norm": lambda x: f"gradient {x:.2f}",
    "loss_scale": lambda x: f"scale {x:g}",
}
"""matrix_share is relative to the device's measured rate for a large matrix product."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: Path
    step: int
    bits_per_byte: float | None
    """Of the last logged training steps."""
    valid_bits_per_byte: float | None
    """Of the last validation. The saved weights are those of the best validation."""
    best_bits_per_byte: float | None
    best_step: int | None
    seconds: float
    bytes_per_second: float
    loader_share: float
    """Fraction of the time spent waiting for data."""
    reason: str
    done: bool
    """Whether the run is finished; otherwise it can be resumed."""
    signal: int | None = None
    """The signal that interrupted the run, or came while a finished run ended: then nothing more should be begun."""

    @property
    def speed(self) -> str:
        return f"{self.seconds:.0f} s, {self.bytes_per_second:,.0f} bytes/s"
