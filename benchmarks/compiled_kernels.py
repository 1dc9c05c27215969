"""Whether the kernels compile to the same code as in another version, for a Hopper GPU, on a machine without one.

python benchmarks/compiled_kernels.py --write now.json                            registers/stack/shared memory of each
git worktree add before COMMIT
PYTHONPATH=before/src python benchmarks/compiled_kernels.py --write before.json
python benchmarks/compiled_kernels.py --compare before.json now.json              exits with 1 if a call differs

The calls are those of `kernel_times.py`, and some with documents and shared keys. Their kernels are compiled for sm_90a, but
not launched. The same PTX means the same bits and times. Kernels whose instructions have another order are counted apart.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # Line numbers would differ with every edit.

import torch
import triton
from kernel_times import CELLS, PATTERNS, SHAPES, commit_of
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import longstride
from longstride.patterns.notation import parse, write

TARGET = GPUTarget("cuda", 90, 32)
H200 = "NVIDIA H200", 227 * 2**10, 132
"""Name, shared memory of a program in bytes, multiprocessors."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Case(NamedTuple):
    shape: str
    pattern: str
    key_heads: int = 0
    """0: as many as heads."""
    documents: int = 1

    @property
    def name(self) -> str:
        keys = f", {self.key_heads} heads of keys" if self.key_heads else ""
        return f"{self.shape} {self.pattern}{keys}" + f", {self.documents} documents" * (self.documents > 1)


class Device:
    """Stands for Triton's driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def cases() -> Iterator[Case]:
    for shape, (_, heads, *_, l) in SHAPES.items():
        for pattern in dict.fromkeys(text.format(l=l, c=min(c, l // 2)) for text in (*PATTERNS, "dense()") for c in CELLS):
            yield Case(shape, pattern)
            if shape in ("enwik8", "odd"):
                yield Case(shape, pattern, documents=5)
                yield Case(shape, pattern, key_heads=heads // 2)
                yield Case(shape, pattern, key_heads=heads // 2, documents=5)


def pretend_hopper() -> None:
    """Has longstride take tensors on a CPU for tensors on an H200."""
    from longstride.attention.kernels import call, ops, settings
    from longstride.attention.kernels.hopper import launch  # noqa: F401  Imports what is replaced below.

    name, memory, count = H200
    there = {"is_hopper": True, "gpu": settings.Gpu(name, memory), "processors": count}
    modules = [module for key, module in sys.modules.items() if key.startswith("longstride.")]
    for attribute, answer in there.items():
        for module in modules:
            if hasattr(module, attribute):
                setattr(module, attribute, lambda device, answer=answer: answer)
    call.BACKENDS = tuple((backend, lambda device: True) for backend, _ in call.BACKENDS)  # type: ignore[misc]
    ops.check = lambda q, k, v: None  # type: ignore[assignment]  # It refuses bfloat16 on a CPU.
    driver.set_active(Device())


def catch_launches() -> list[Any]:
    """Has Triton compile kernels without a launch. Returns the list to which each launch adds its kernel."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    return compiled


def launches(case: Case, compiled: list[Any]) -> list[Any]:
    """The kernels of a case, forward and backward."""
    from longstride.attention.kernels import ops

    batch, heads, n, d_qk, d_v, _ = SHAPES[case.shape]
    batch = min(batch, 2)  # More would only enlarge the tensors.
    q, k, v = (
        torch.empty(batch, count, n, d, dtype=torch.bfloat16)
        for count, d in ((heads, d_qk), (case.key_heads or heads, d_qk), (case.key_heads or heads, d_v))
    )
    lengths = [n // 8 + 3 * index for index in range(case.documents - 1)]
    documents = [*lengths, n - sum(lengths)] if lengths else []
    patterns = write(parse(case.pattern) * heads)
    compiled.clear()
    output, lse = ops.triton_forward(q, k, v, patterns, d_qk**-0.5, documents)
    ops.triton_backward(output, None, q, k, v, output, lse, patterns, d_qk**-0.5, documents, [True] * 3)
    return list(compiled)


def describe(kernel: Any) -> dict[str, Any]:
    ptx = "\n".join(line for line in kernel.asm["ptx"].splitlines() if line.strip() and not line.lstrip().startswith("//"))
    instructions = Counter(re.findall(r"^\s+(?:@!?%\w+ )?([a-z][\w.:]*)", ptx, re.MULTILINE))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.findall(r"(?:REG|STACK):(\d+)", usage.stdout))
    return {
        "kernel": kernel.name,
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "instructions": digest(sorted(instructions.items())),
        "ptx": digest(ptx),
    }


def digest(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def compile_all(only: str) -> dict[str, list[dict[str, Any]]]:
    """What the kernels of each call compile to, in the order of their launches."""
    pretend_hopper()
    compiled = catch_launches()
    described: dict[Any, dict[str, Any]] = {}
    found = {}
    for case in cases():
        name = case.name
        if only not in name:
            continue
        found[name] = []
        for kernel in launches(case, compiled):
            if kernel not in described:
                described[kernel] = describe(kernel)
            found[name].append(described[kernel])
        print(f"{name}:", ", ".join(f"{one['kernel']} {resources(one)}" for one in found[name]), flush=True)
    return found


def resources(kernel: dict[str, Any]) -> str:
    return f"{kernel['registers']}/{kernel['stack']}/{kernel['shared']}"


def compare(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Prints what differs. Returns whether anything does but the order of instructions, or a call is missing."""
    kernels = same = reordered = 0
    different: dict[str, None] = {}
    for name in before.keys() & now.keys():
        ours, theirs = now[name], before[name]
        if [one["kernel"] for one in ours] != [one["kernel"] for one in theirs]:
            different[f"{name}: other kernels"] = None
            continue
        for one, other in zip(ours, theirs):
            kernels += 1
            if one["ptx"] == other["ptx"]:
                same += 1
            elif all(one[key] == other[key] for key in ("instructions", "registers", "stack", "shared")):
                reordered += 1
            else:
                numbers = f"{resources(other)} -> {resources(one)}"
                different[f"{name}: {one['kernel']}, registers/stack/shared {numbers}"] = None
    missing = len(before.keys() ^ now.keys())
    print(
        f"{kernels} launches of {len(before.keys() & now.keys())} calls: {same} have the same PTX, {reordered} the same "
        f"instructions in another order; {len(different)} lines differ; {missing} calls are in one version only"
    )
    for line in different:
        print(line)
    return bool(different or missing or not kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, help="file for what the kernels compile to")
    group.add_argument("--compare", type=Path, nargs=2, help="two such files")
    parser.add_argument("--only", default="", help='calls whose names contain this, such as "music column"')
    given = parser.parse_args()
    if given.write:
        found = compile_all(given.only)
        if not found:
            parser.error(f"no call's name contains --only {given.only!r}")
        versions = {"triton": triton.__version__, "commit": commit_of(Path(longstride.__file__).parent)}
        given.write.write_text(json.dumps({**versions, "calls": found}, indent=1) + "\n")
    else:
        before, now = (json.loads(path.read_text()) for path in given.compare)
        if before["triton"] != now["triton"]:
            parser.error(f"one file is of Triton {before['triton']}, the other of {now['triton']}: compile both with one")
        print(f"Triton {now['triton']}; {before['commit']} and {now['commit']}:")
        sys.exit(compare(before["calls"], now["calls"]))


if __name__ == "__main__":
    main()
