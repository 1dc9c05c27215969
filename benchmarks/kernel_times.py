"""Whether the kernels are as fast as in another version: GPU time of attend in both, in turns, and the ratios.

git worktree add before COMMIT
python benchmarks/kernel_times.py --other before/src --json times.json

Each version runs in processes of its own, `--rounds` of them, the two in turns; the least time of a case counts. Without a
GPU, or with --tiny, it times short sequences with the clock of the host, which shows that the script works.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longstride.patterns import Pattern

SHAPES = {
    "enwik8": (8, 8, 12_288, 64, 64, 128), "imagenet64": (8, 16, 12_288, 32, 32, 128), "cifar10": (32, 2, 3072, 64, 128, 96),
    "music": (1, 16, 65_536, 32, 32, 256), "odd": (2, 4, 10_007, 80, 96, 100),
}  # fmt: skip
"""Batch, heads, n, d_qk, d_v and l."""
TINY = {"tiny": (1, 2, 64, 8, 8, 8)}
PATTERNS = ("local({l})", "column({l})", "block({l})", "local({l}) | column({l})", "block({l}) | summary({l}, {c})")
CELLS = 32, 8
"""The c of merged fixed."""
REPEATS = 7
SOURCE = Path(__file__).resolve().parent.parent / "src"


def times(shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Milliseconds of each case in the version that this process imports."""
    from longstride.patterns.notation import parse

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, float] = {}
    for shape, (batch, heads, n, d_qk, d_v, l) in shapes.items():
        texts = dict.fromkeys(text.format(l=l, c=min(c, l // 2)) for text in PATTERNS for c in CELLS)
        *inputs, slopes = (torch.randn(batch, heads, n, d, device=device).to(dtype) for d in (d_qk, d_qk, d_v, d_v))
        for text in texts:
            (pattern,) = parse(text)
            forward, both = least_times(inputs, slopes, pattern)
            found |= {f"{shape} {text} forward": forward, f"{shape} {text} with backward": both}
    return found


def least_times(inputs: list[Tensor], slopes: Tensor, pattern: "Pattern") -> list[float]:
    """Milliseconds forward, and with backward."""
    from longstride import attend
    from longstride.commands.bench.measure import gpu_seconds

    leaves = [x.detach().requires_grad_() for x in inputs]

    def both() -> None:
        torch.autograd.grad(attend(*leaves, pattern), leaves, slopes)

    def seconds(call: Callable[[], object]) -> float:
        if slopes.is_cuda:
            return gpu_seconds(call, slopes.device)
        start = perf_counter()
        call()
        return perf_counter() - start

    calls = (lambda: attend(*inputs, pattern)), both
    for call in calls * 2:  # A second call of a plan is the first that the driver launches.
        call()
    return [1e3 * min(seconds(call) for _ in range(REPEATS)) for call in calls]


def compare(other: Path, rounds: int, tiny: bool) -> dict[str, list[float]]:
    """The least time of each case in this version, in the other one, and their ratio."""
    least: list[dict[str, float]] = [{}, {}]
    for number in range(2 * rounds):
        version = number % 2
        source = other if version else SOURCE
        command = [sys.executable, __file__, "--run", *["--tiny"] * tiny]
        path = os.pathsep.join([str(source.resolve()), os.environ.get("PYTHONPATH", "")])
        out = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True)
        for name, value in json.loads(out.stdout).items():
            least[version][name] = min(value, least[version].get(name, value))
    return {name: [value, least[1][name], value / least[1][name]] for name, value in least[0].items()}


def commit_of(source: Path) -> str:
    found = subprocess.run(["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the folder src of the other version")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", action="store_true", help="time one version and print JSON; this script calls itself so")
    given = parser.parse_args()
    tiny = given.tiny or not torch.cuda.is_available()
    if given.run:
        print(json.dumps(times(TINY if tiny else SHAPES)))
        return
    if given.other is None:
        parser.error("--other is missing: the folder src of the version to compare with")
    from longstride.common.device import describe_machine

    rows = compare(given.other, given.rounds, tiny)
    ratios = sorted(row[2] for row in rows.values())
    print(f"{len(ratios)} cases, this version / the other: {ratios[0]:.3f} to {ratios[-1]:.3f}, median {median(ratios):.3f}")
    for name, (ours, theirs, ratio) in sorted(rows.items(), key=lambda row: -row[1][2])[:5]:
        print(f"{ratio:.3f}  {name}: {ours:.4f} and {theirs:.4f} ms")
    if given.json is not None:
        machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        versions = [commit_of(source) for source in (SOURCE, given.other)]
        columns = ["this version, ms", "the other, ms", "ratio"]
        result = {"machine": machine, "versions": versions, "columns": columns, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
