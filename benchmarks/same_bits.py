"""Whether attend has the same bits as in another version: outputs and gradients of fixed cases, as hashes.

python benchmarks/same_bits.py --write before.json        in the one version
python benchmarks/same_bits.py --compare before.json      in the other; names each case that differs, and exits with 1

On a CPU: reference, blocked, and the Triton kernels in the interpreter with TRITON_INTERPRET=1. On a GPU: the Triton
kernels, Hopper's among them. Inputs are drawn on the CPU, so a machine compares only with itself.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longstride import attend
from longstride.common.device import describe_machine
from longstride.patterns.notation import parse

PATTERNS = (
    "dense()", "local(7)", "local(16)", "local(128)", "column(5)", "column(16)", "block(16)", "block(128)", "summary(16, 4)",
    "dilated(6, 3)", "local(16) | column(16)", "local(128) | column(128)", "block(16) | summary(16, 4)",
    "block(128) | summary(128, 32)",
)  # fmt: skip


class Case(NamedTuple):
    impl: str
    pattern: str
    dtype: str
    batch: int
    heads: int
    key_heads: int
    n: int
    d_qk: int
    d_v: int
    documents: tuple[int, ...]


def cases(on_gpu: bool) -> Iterator[Case]:
    impls = ["triton"] if on_gpu else ["reference", "blocked"] + ["triton"] * ("TRITON_INTERPRET" in os.environ)
    sizes = ((4096, 64, 64), (3072, 64, 128), (1000, 32, 32)) if on_gpu else ((50, 16, 16),)
    for impl in impls:
        for pattern in PATTERNS:
            for dtype in ("bfloat16", "float16", "float32") if on_gpu else ("float32", "float64")[: 1 + (impl != "triton")]:
                for n, d_qk, d_v in sizes:
                    plain = Case(impl, pattern, dtype, *((2, 4, 4) if on_gpu else (1, 2, 2)), n, d_qk, d_v, ())
                    yield plain
                    yield plain._replace(key_heads=plain.heads // 2)
                    yield plain._replace(documents=(n // 2, n // 4, n - n // 2 - n // 4))


def bits(case: Case, device: torch.device) -> str:
    """The hash of output, lse, dq, dk and dv."""
    generator = torch.Generator().manual_seed(0)

    def some(heads: int, d: int) -> torch.Tensor:
        drawn = torch.randn(case.batch, case.n, heads, d, generator=generator).to(device, getattr(torch, case.dtype))
        return drawn.transpose(1, 2).requires_grad_()

    q, k, v = some(case.heads, case.d_qk), some(case.key_heads, case.d_qk), some(case.key_heads, case.d_v)
    (pattern,) = parse(case.pattern)
    documents = list(case.documents) or None
    output, lse = attend(q, k, v, pattern, impl=case.impl, documents=documents, return_lse=True)
    gradients = torch.autograd.grad(attend(q, k, v, pattern, impl=case.impl, documents=documents).square().sum(), (q, k, v))
    digest = hashlib.sha256()
    for x in (output, lse, *gradients):
        digest.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, help="file for the hashes")
    group.add_argument("--compare", type=Path, help="file of another version")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {" ".join(map(str, case)): bits(case, device) for case in cases(device.type == "cuda")}
    if given.write:
        result: dict[str, Any] = {"machine": describe_machine(device), "cases": found}
        given.write.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {len(found)} cases to {given.write}")
        return
    before = json.loads(given.compare.read_text())["cases"]
    different = [name for name, value in found.items() if before.get(name, value) != value]
    missing = len(found.keys() ^ before.keys())
    print(f"{len(found) - len(different)} of {len(found)} cases have the same bits; {missing} are in one version only")
    for name in different:
        print(f"differs: {name}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
