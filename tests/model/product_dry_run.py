"""Calls the operators of the feed-forward network as on a Hopper GPU, without one, and describes their launches as JSON.

python -m tests.model.product_dry_run '[[1000, 512, 2048, "bfloat16"]]'
"""

import json
import sys

import torch

from longstride.model import product_kernels, product_ops, residual_kernels
from tests.attention.kernels.hopper.dry_run import PROCESSORS, Caught, found


def run(rows, depth, width, dtype):
    """The launches of both passes, with bias and slopes and without."""
    x, inner = (torch.zeros(rows, size, dtype=getattr(torch, dtype)) for size in (depth, width))
    weight = torch.zeros(width, depth, dtype=x.dtype)
    for bias in (torch.zeros(width), None):
        product_ops._product_gelu(x, weight, bias, bias is not None)
        product_ops._product_gelu_backward(x, weight.T.contiguous(), inner, bias is not None)
    launched, found[:] = list(found), []
    return launched


if __name__ == "__main__":
    product_ops.takes = lambda *_: True
    product_kernels.processors = lambda device: PROCESSORS
    for name in ("gelu_product", "gelu_product_gradient"):
        setattr(product_kernels, name, Caught(getattr(product_kernels, name)))
    residual_kernels.sum_rows = Caught(residual_kernels.sum_rows)
    print(json.dumps([run(*row) for row in json.loads(sys.argv[1])]))
