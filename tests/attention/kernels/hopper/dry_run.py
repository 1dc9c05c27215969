"""Calls the operators as on a Hopper GPU, without one: launches are caught, compiled for it, and described as JSON.

python dry_run.py '[["merged(fixed(128, 32))", 1, 2, 1000, 64, 64, "bfloat16"]]'

Without an argument it answers one case per line of standard input, and a case that fails with its traceback.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longstride.attention.kernels import call, general, ops, views
from longstride.attention.kernels.hopper import (
    choice,
    chunk_forward,
    lane_backward,
    lane_descriptors,
    lane_forward,
    launch,
    walk_backward,
    walk_forward,
)
from longstride.patterns import notation

PROCESSORS = 132
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
found: list[dict] = []
compiled: dict = {}


class Caught:
    """Stands for a kernel."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.name = kernel.fn.__name__

    def __getitem__(self, grid):
        def call(*arguments, num_warps=4, maxnreg=None, **constants):
            names = self.kernel.arg_names
            assert sorted(constants) == sorted(names[len(arguments) :])
            if not isinstance(self.kernel, GluonJITFunction):  # plain Triton, which other tests interpret
                found.append({"kernel": self.name})
                return
            signature = {name: describe(x) for name, x in zip(names, arguments)} | dict.fromkeys(constants, "constexpr")
            missing = [(names[path[0]], path) for path in places_of_none(arguments)]
            constants |= {name: None for name, path in missing if len(path) == 1}
            values = {(names.index(name),): x for name, x in constants.items()} | {path: None for _, path in missing}
            options = {"num_warps": num_warps} | ({"maxnreg": maxnreg} if maxnreg else {})
            key = self.name, str(signature), str(values), str(options)
            if key not in compiled:
                compiled[key] = resources(GluonASTSource(self.kernel, signature, values, {}), options)
            together = -(-grid[0] // PROCESSORS) if grid[0] > 1 else 1
            found.append({"kernel": self.name, "constants": str(constants), "together": together, **compiled[key]})

        return call


def places_of_none(arguments):
    """Indices of what is None, also in tuples."""
    for index, x in enumerate(arguments):
        if x is None:
            yield (index,)
        elif isinstance(x, tuple):
            yield from ((index, *path) for path in places_of_none(x))


def describe(x):
    if x is None:
        return "constexpr"
    if isinstance(x, tuple):
        return type(x)(*map(describe, x))
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{TYPES[x.base.dtype]}[{','.join(map(str, x.block_shape))}],{x.layout}>"
    if isinstance(x, torch.Tensor):
        return "*" + TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i64" if abs(x) >= 2**31 else "i32"


def resources(source, options):
    """Registers, bytes of stack and of shared memory, and whether asynchronous products had to be made one by one."""
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(binary.asm["cubin"])
        ptx.write_text(binary.asm["ptx"])
        usage = subprocess.run([TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
        words = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", os.devnull]
        remarks = subprocess.run(words, capture_output=True, text=True).stderr
    match = re.search(r"REG:(\d+).*?STACK:(\d+)", usage)
    return {
        "registers": int(match[1]),
        "stack": int(match[2]),
        "shared": binary.metadata.shared,
        "serialized": "serialized" in remarks,
        "copied": copied_columns(binary.asm["ttgir"]),
    }


def copied_columns(ttgir):
    """For each tensor that TMA copies in as tiles of lanes: the first columns of the panels."""
    columns: dict[str, list[str]] = {}
    for name, column in re.findall(r"async_tma_copy_global_to_local %(\w+)\[(?:[^],]*,){4} %c(\d+)_i32\w*\]", ttgir):
        columns[name] = sorted({*columns.get(name, []), column})
    return columns


def as_on_hopper():
    call.BACKENDS = tuple((name, lambda device: True) for name, _ in call.BACKENDS)
    general.forward = general.backward = lambda *_: []
    ops.check = lambda q, k, v: None  # On a CPU it refuses bfloat16.
    views.LEAST_ROWS = 0
    choice.is_hopper = lambda device: True
    for module in (chunk_forward, lane_descriptors, launch):
        module.processors = lambda device: PROCESSORS
    for module in (chunk_forward, lane_forward, lane_backward, walk_forward, walk_backward):
        name = module.__name__.rsplit(".", 1)[1]
        setattr(module, name, Caught(getattr(module, name)))
    for name in ("window_forward", "past_forward", "hopper_dq", "hopper_dkv", "backward_row_stats", "backward_sum_parts"):
        setattr(launch, name, Caught(getattr(launch, name)))


def run(patterns, batch, heads, n, d_qk, d_v, dtype, key_heads=None, documents=()):
    """What is launched forward, and backward."""
    q, k, v = (
        torch.zeros(batch, count, n, d, dtype=getattr(torch, dtype))
        for count, d in ((heads, d_qk), (key_heads or heads, d_qk), (key_heads or heads, d_v))
    )
    one_each = notation.parse(patterns)
    text = notation.write(one_each * (heads // len(one_each)))
    output, lse = ops.triton_forward(q, k, v, text, 1.0, documents)
    forward, found[:] = list(found), []
    ops.triton_backward(output, None, q, k, v, output, lse, text, 1.0, documents, [True] * 3)
    backward, found[:] = list(found), []
    return [forward, backward]


def serve(requests):
    for request in requests:
        try:
            answer = run(*json.loads(request))
        except Exception:
            answer, found[:] = traceback.format_exc(), []
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    as_on_hopper()
    if len(sys.argv) > 1:
        print(json.dumps([run(*row) for row in json.loads(sys.argv[1])]))
    else:
        serve(sys.stdin)
