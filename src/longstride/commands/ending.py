"""The end of a training run: what is printed, and the exit code."""

import os
import shlex
import sys
from typing import TYPE_CHECKING

from longstride.commands.exits import SIGNAL_BASE

if TYPE_CHECKING:
    from longstride.training import Summary

RESULTS = ("model.safetensors", "curve.png", "sample-data.*", "sample-model.*", "metrics.jsonl", "checkpoints")
"""Files that a run writes and users look at."""


def describe_ending(preset: str, summary: "Summary") -> list[str]:
    """Lines that say how the run ended, what it wrote, and how to go on if there are steps left."""
    from longstride.training.reporting import DONE

    idle = summary.done and not summary.bytes_per_second
    speed = "nothing was left to train" if idle else summary.speed
    lines = [f"{summary.folder}: step {summary.step}, {summary.reason}; {speed}"]
    if summary.best_bits_per_byte is not None:
        lines.append(f"best validation {summary.best_bits_per_byte:.4f} bits per byte, at step {summary.best_step}")
    written = [name for name in RESULTS if list(summary.folder.glob(name))]
    lines.append(f"{'there' if idle else 'written'}: {', '.join(written)}")
    launcher = ", started by torchrun as before" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    command = shlex.join(["longstride", "train", preset, "--out", str(summary.folder), "--resume"])
    if not summary.done:
        lines.append(f"all is saved; to go on{launcher}: {command}")
    elif summary.reason != DONE:  # Patience stopped it.
        lines.append(f"to go on all the same{launcher}: {command} --patience 0")
    elif idle:
        lines.append(f"to train longer{launcher}: {command} --steps {2 * summary.step}")
    return lines


def exit_if_interrupted(summary: "Summary") -> None:
    """Exits with 130 after SIGINT and 143 after SIGTERM, as the signal itself would."""
    if summary.signal is not None:
        sys.exit(SIGNAL_BASE + summary.signal)
