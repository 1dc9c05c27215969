"""Summary: what `train` returns."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: Path
    step: int
    bits_per_byte: float | None
    """Of the last logged training steps."""
    valid_bits_per_byte: float | None
    """Of the last validation; the best one's weights are kept."""
    best_bits_per_byte: float | None
    best_step: int | None
    seconds: float
    bytes_per_second: float
    loader_share: float
    """Of the time, how much was spent waiting for data."""
    reason: str
    done: bool
    """Whether there is nothing left to do; else `resume` goes on."""
    signal: int | None = None
    """The signal that interrupted it, if one did."""

    @property
    def speed(self) -> str:
        return f"{self.seconds:.0f} s, {self.bytes_per_second:,.0f} bytes/s"
