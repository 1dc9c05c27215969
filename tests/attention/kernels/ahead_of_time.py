"""Compiles kernels for an architecture, without a GPU, and prints the shared memory of each in bytes.

python ahead_of_time.py 89 '[["dq", true, 64, "bfloat16", 64, 64, 4, 3]]'
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longstride.attention.kernels.backward import backward_dkv, backward_dq
from longstride.attention.kernels.forward import forward

KERNELS = {"forward": forward, "dq": backward_dq, "dkv": backward_dkv}
POINTERS = {"log_sum_exp": "*fp32", "mean": "*fp32", "jobs": "*i32", "exclusions": "*i32"}
POINTERS |= dict.fromkeys(("q", "k", "v", "output", "gradient", "dq", "dk", "dv"), "*data")
DATA = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def shared_memory(arch, kernel, summary, width, dtype, rows, columns, warps, stages):
    constants = {
        "D_QK": width, "D_V": width, "WIDTH_QK": width, "WIDTH_V": width, "WIDE": False, "ROWS": rows, "COLUMNS": columns,
        "SUMMARY": summary, "CELLS": summary, "EVEN": True, "GROUPED": False, "SHORT": not summary, "EXCLUDE": 0,
        "LATER": False, "PRECISION": "ieee" if dtype == "float32" else "tf32",
    }  # fmt: skip
    signature, values, aligned = {}, {}, {}
    for index, name in enumerate(KERNELS[kernel].arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        pointer = POINTERS.get(name)
        signature[name] = pointer.replace("data", DATA[dtype]) if pointer else "fp32" if "scale" in name else "i32"
        if pointer or name.endswith(("_batch", "_head", "_row")):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(KERNELS[kernel], signature, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared


if __name__ == "__main__":
    print(json.dumps([shared_memory(int(sys.argv[1]), *row) for row in json.loads(sys.argv[2])]))
