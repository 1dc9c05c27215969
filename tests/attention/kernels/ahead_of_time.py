"""Compiles kernels for an architecture, without a GPU, and prints the shared memory of each in bytes.

python ahead_of_time.py 89 '[["dq", true, 64, "bfloat16", 64, 64, 4, 3]]'

A row ends with true for a call with documents.
"""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longstride.attention.kernels.arguments import Dims, Gradients, Matrix, RowShape, Scales, Sizes, Tables, Tiling, compiled
from longstride.attention.kernels.backward import Queries, backward_dkv, backward_dq
from longstride.attention.kernels.forward import forward
from longstride.attention.kernels.lanes import lane_backward, lane_forward

LANES = {"lane_forward": lane_forward, "lane_backward": lane_backward}
KERNELS = {"forward": forward, "dq": backward_dq, "dkv": backward_dkv, **LANES}
DATA = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
ALIGNED = [["tt.divisibility", 16]]


def shared_memory(arch, kernel, summary, width, dtype, rows, columns, warps, stages, varied=False):
    row = compiled(RowShape, d=width, width=width, wide=False)
    tiling = compiled(
        Tiling, rows=rows, columns=columns, summary=summary, even=True, by_block=False, short=not summary, exclude=0,
        varied=varied, **({"shared": True, "same": True, "stages": stages} if kernel in LANES else {}),
    )  # fmt: skip
    dims = Dims(tl.constexpr(row), tl.constexpr(row))
    constants = {"DIMS": dims, "TILES": tiling, "CELLS": summary, "ACCUMULATE": kernel in LANES}
    matrix = Matrix(DATA[dtype], "i32", "i32", "i32")
    types = {
        "lse": "*fp32", "queries": Queries(matrix, matrix, "*fp32", "*fp32"), "gradients": Gradients(*[matrix] * 3),
        "tables": Tables("*i32", "*i32", *["*i32" if varied else "constexpr"] * 2), "sizes": Sizes(*["i32"] * 5),
        "scale": "fp32", "scales": Scales("fp32", "fp32"),
    }  # fmt: skip
    signature, values, aligned = {}, {}, {}
    for index, name in enumerate(KERNELS[kernel].arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, matrix)
        for path, kind in leaves(signature[name], (index,)):
            if kind == "constexpr":
                values[path] = None
            elif kind.startswith("*") or name not in ("sizes", "scale", "scales"):
                aligned[path] = ALIGNED
    source = ASTSource(KERNELS[kernel], signature, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared


def leaves(kind, path):
    """The paths and types of an argument's fields."""
    if isinstance(kind, tuple):
        for field, part in enumerate(kind):
            yield from leaves(part, (*path, field))
    else:
        yield path, kind


if __name__ == "__main__":
    print(json.dumps([shared_memory(int(sys.argv[1]), *row) for row in json.loads(sys.argv[2])]))
