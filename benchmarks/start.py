"""Time that the command line takes to print help or refuse bad arguments: wall time and CPU time of ten calls each.

python benchmarks/start.py --json benchmarks/results/start-cpu.json

Other work on the machine adds to the wall time, so the fastest call is recorded beside the median, and the load.
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
    "eval nowhere": 2,
    "sample nowhere --temperature -1": 2,
    "train text-small --data nowhere --out y": 2,
    "bench attention --lengths 0": 2,
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
        times = f"{row['wall_s']:.3f} s, fastest {row['fastest_s']:.3f} s, CPU {row['cpu_s']:.3f} s"
        print(f"{times}  longstride {row['words']}")
    slow = [row["words"] for row in rows if row["fastest_s"] >= GOAL]
    print(f"slower than {GOAL} s: {', '.join(slow)}" if slow else f"all in less than {GOAL} s")
    if options.json is not None:
        machine = {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        }
        result = {"machine": machine, "repeats": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measure(words: str, code: int, repeats: int) -> dict[str, str | float]:
    """Median and fastest of calls in new processes, after one that fills the caches."""
    walls, cpus = [], []
    for _ in range(repeats + 1):
        before, start = os.times(), perf_counter()
        command = [sys.executable, "-m", "longstride", *words.split()]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        wall, after = perf_counter() - start, os.times()
        assert done.returncode == code, f"{words}: exit code {done.returncode}, not {code}"
        walls.append(wall)
        cpus.append(after.children_user + after.children_system - before.children_user - before.children_system)
    medians = {"wall_s": round(median(walls[1:]), 4), "cpu_s": round(median(cpus[1:]), 4)}
    return {"words": words, **medians, "fastest_s": round(min(walls[1:]), 4)}


if __name__ == "__main__":
    main()
