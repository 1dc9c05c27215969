"""How long the command line takes to answer without work to do: wall time and CPU time, the median of ten calls each.

python benchmarks/start.py --json benchmarks/results/start-cpu.json
"""

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from time import perf_counter

CALLS = {
    "--version": 0,
    "--help": 0,
    "train --help": 0,
    "help sample": 0,
    "trian": 2,
    "train text-small --stesp 3": 2,
    "train text-small --steps many": 2,
    "train text-small --data x --out y --model.heads 3": 2,
    "eval RUN --batch x": 2,
    "completion bash": 0,
}
"""Arguments and the exit code that they must give."""
GOAL = 0.5
"""Seconds."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(words, code, options.repeats) for words, code in CALLS.items()]
    for row in rows:
        print(f"{row['wall_s']:.3f} s  {row['cpu_s']:.3f} s of CPU  longstride {row['words']}")
    slow = [row["words"] for row in rows if row["wall_s"] >= GOAL]
    print(f"slower than {GOAL} s: {', '.join(slow)}" if slow else f"all in less than {GOAL} s")
    if options.json is not None:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        }
        result = {"machine": machine, "repeats": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(words: str, code: int, repeats: int) -> dict[str, str | float]:
    """Medians over calls in new processes, after one that fills the caches."""
    walls, cpus = [], []
    for _ in range(repeats + 1):
        before, start = os.times(), perf_counter()
        command = [sys.executable, "-m", "longstride", *words.split()]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        wall, after = perf_counter() - start, os.times()
        assert done.returncode == code, f"{words}: exit code {done.returncode}, not {code}"
        walls.append(wall)
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"words": words, "wall_s": round(median(walls[1:]), 4), "cpu_s": round(median(cpus[1:]), 4)}


if __name__ == "__main__":
    main()
