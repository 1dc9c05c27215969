"""Times of `attend` in plain PyTorch on a CPU, for few queries among many keys and for documents of many lengths.

python benchmarks/cpu_layouts.py --json benchmarks/results/layouts-cpu.json [--tiny]
PYTHONPATH=before/src python benchmarks/cpu_layouts.py --json before.json     # another version, in a worktree `before`

queries:   forward for the last queries of a sequence, beside SDPA over all keys
documents: forward, and with backward, for documents of one mean length: all alike, or from half to three halves of it

Milliseconds, the least of some calls; one thread.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from longstride import attend
from longstride.common.device import describe_machine
from longstride.patterns.notation import parse

PATTERNS = ("local(128) | column(128)", "block(128) | summary(128, 8)")


def milliseconds(call: Any, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return round(min(times) * 1e3, 3)


def of_queries(heads: int, n: int, repeats: int) -> list[dict[str, Any]]:
    q, k, v = torch.randn(3, 1, heads, n, 64).unbind()
    rows = []
    for count in (1, 4, 16, 64, 256):
        last = q[:, :, -count:]
        for text in PATTERNS:
            (pattern,) = parse(text)
            with torch.no_grad():
                ours = milliseconds(lambda last=last, pattern=pattern: attend(last, k, v, pattern), repeats)
                dense = milliseconds(lambda last=last: scaled_dot_product_attention(last, k, v), repeats)
            rows.append(
                {"part": "queries", "n": n, "heads": heads, "queries": count, "pattern": text, "ms": ours, "sdpa": dense}
            )
    return rows


def lengths(n: int, mean: int, alike: bool) -> list[int]:
    if alike:
        return [mean] * (n // mean)
    drawn = torch.randint(mean // 2, mean * 3 // 2, (4 * n // mean,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    return [b - a for a, b in pairwise([0, *drawn[drawn < n].tolist(), n])]


def of_documents(heads: int, n: int, repeats: int) -> list[dict[str, Any]]:
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, heads, n, 64).unbind()]
    slopes = torch.randn(1, heads, n, 64)
    rows = []
    for text in PATTERNS:
        (pattern,) = parse(text)
        for mean, alike in (
            (n, True),
            *((mean, alike) for mean in (16, 64, 256, 1024) if mean < n for alike in (True, False)),
        ):
            documents = None if mean == n else lengths(n, mean, alike)

            def forward(pattern=pattern, documents=documents):
                with torch.no_grad():
                    return attend(*inputs, pattern, documents=documents)

            def both(pattern=pattern, documents=documents):
                torch.autograd.grad(attend(*inputs, pattern, documents=documents), inputs, slopes)

            times = {"ms": milliseconds(forward, repeats), "both": milliseconds(both, repeats)}
            rows.append(
                {"part": "documents", "n": n, "heads": heads, "mean": mean, "alike": alike, "pattern": text, **times}
            )
    return rows


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.tiny:
        rows = [*of_queries(2, 300, 1), *of_documents(2, 256, 1)]
    else:
        rows = [*of_queries(8, 16384, 5), *of_queries(12, 1024, 5), *of_documents(8, 8192, 3)]
    for row in rows:
        print(*row.values())
    arguments.json.write_text(json.dumps({"machine": describe_machine(torch.device("cpu")), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    main(parser.parse_args())
