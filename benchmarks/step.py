"""Time and memory of training steps, plain and captured as a CUDA graph, in one process.

    python benchmarks/step.py --json benchmarks/results/step-h200.json
    python benchmarks/step.py "enwik8 dropout=0.4 recompute=on" "cifar10 optimizer=muon batch=16" --eager

A case is a preset and settings that differ from: the preset's pattern, no dropout, recompute=off, optimizer=adamw, compiled
blocks. Steps are those of `longstride train`, on random bytes. A case runs plainly first, then captured.
"""

import gc
import json
import platform
import tempfile
from argparse import ArgumentParser
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from longstride.data.store import write_store
from longstride.training import train_preset
from longstride.training.config import TrainConfig
from longstride.training.trainer import Trainer

CASES = (
    "enwik8",
    "enwik8 pattern=interleave(strided(128))",
    "enwik8 dropout=0.4",
    "enwik8 dropout=0.4 recompute=on",
    "enwik8 optimizer=muon",
    "cifar10 batch=16",
    "cifar10 batch=16 dropout=0.25",
    "cifar10 batch=16 optimizer=muon",
)
GIB = 2**30


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the first round; the third is captured")
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'milliseconds of a step':48} {'plain':>9} {'captured':>9} {'ratio':>6}   peak GiB (reserved): plain, captured")
    for case in options.cases:
        row = measure(case, options.steps, options.rounds, options.warm_up, not options.eager)
        rows.append(row)
        plain, captured = row["plain"], row["captured"]
        ratio = plain["milliseconds"] / captured["milliseconds"]
        memory = ", ".join(f"{one['allocated_gib']:.2f} ({one['reserved_gib']:.2f})" for one in (plain, captured))
        print(
            f"{case:48} {plain['milliseconds']:9.2f} {captured['milliseconds']:9.2f} {ratio:6.2f}   {memory:>28}", flush=True
        )
    if options.json is not None:
        result = {"machine": machine(), "compiled": not options.eager, "steps": options.steps, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


def measure(case: str, steps: int, rounds: int, warm_up: int, compiled: bool) -> dict:
    """Milliseconds of a step, as the median of rounds, and peak memory of either way."""
    row: dict = {"case": case}
    with tempfile.TemporaryDirectory() as folder:
        for name, capture in (("plain", "off"), ("captured", "auto")):
            made = settings(case, Path(folder), compiled)
            with closing(Trainer(replace(made, capture=capture, out=f"{folder}/{name}"), False)) as trainer:
                row[name] = time_steps(trainer, steps, rounds, warm_up)
            del trainer
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return row


def settings(case: str, folder: Path, compiled: bool) -> TrainConfig:
    name, *words = case.split()
    changes = dict(word.split("=", 1) for word in words)
    model: dict = {"dropout": float(changes.pop("dropout", 0)), "recompute": changes.pop("recompute", "off")}
    if "pattern" in changes:
        model["pattern"] = changes.pop("pattern")
    optimizer = {"name": changes.pop("optimizer", "adamw")}
    numbers = {name: int(value) for name, value in changes.items() if name in ("batch", "accumulate")}
    sizes = {name: int(value) for name, value in changes.items() if name not in numbers}
    made = train_preset(name, compile=compiled, model={**model, **sizes}, optimizer=optimizer, steps=1_000_000, **numbers)
    shape = made.model.positions.sizes
    item, kind = (shape, "images") if len(shape) == 3 else ((), "text")
    size = made.model.context * max(64, made.batch)
    splits = {"train": size, "valid": made.model.context * 4}
    data = {name: np.random.default_rng(0).integers(0, 256, size, np.uint8) for name, size in splits.items()}
    if not (folder / "data").exists():
        write_store(folder / "data", kind, data, tuple(item))
    return replace(made, data=str(folder / "data"))


def time_steps(trainer: Trainer, steps: int, rounds: int, warm_up: int) -> dict:
    config, on_gpu = trainer.config, trainer.device.type == "cuda"
    batches = [torch.from_numpy(trainer.training.batch(0, number, config.batch)).to(trainer.device) for number in range(4)]
    if on_gpu:  # From here on, as a graph takes its memory when it is captured.
        torch.cuda.reset_peak_memory_stats()
    first = perf_counter()
    trainer.take_step(batches[0])
    trainer.finish_steps()
    first = perf_counter() - first
    for number in range(1, warm_up):
        trainer.take_step(batches[number % 4])
    trainer.finish_steps()
    times = []
    for _ in range(rounds):
        begun = perf_counter()
        for number in range(steps):
            trainer.take_step(batches[number % 4])
        trainer.finish_steps()
        times.append((perf_counter() - begun) / steps)
    return {
        "milliseconds": 1e3 * median(times),
        "fastest": 1e3 * min(times),
        "first_step_seconds": first,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0,
        "captured": getattr(trainer.compute, "graph", None) is not None,
        "plain_because": trainer.plain_because,
        "last_loss": trainer.run_state.losses[-1],
    }


if __name__ == "__main__":
    main()
