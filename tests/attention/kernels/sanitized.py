"""Forward and backward of every kernel once, for compute-sanitizer: python sanitized.py"""

import torch

from longstride import attend
from longstride.patterns import notation

CASES = [  # pattern, n, d, dtype, and documents: odd lengths, so that every tile has an end
    ("merged(fixed(128, 32))", 405, 64, torch.bfloat16),
    ("summary(128, 16)", 300, 64, torch.bfloat16),
    ("dense()", 333, 64, torch.bfloat16),
    ("local(128)", 301, 64, torch.bfloat16),
    ("local(128)", 301, 64, torch.bfloat16, [100, 1, 200]),
    ("merged(strided(8))", 203, 32, torch.bfloat16),
    ("merged(strided(8))", 203, 80, torch.float16),
    ("merged(fixed(24, 3))", 203, 16, torch.float32),
]

if __name__ == "__main__":
    for text, n, d, dtype, *documents in CASES:
        q, k, v, slopes = (torch.randn(1, 2, n, d).to(dtype).cuda() for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        given = {"documents": documents[0]} if documents else {}
        attend(*leaves, notation.parse(text)[0], impl="triton", **given).backward(slopes)
        torch.cuda.synchronize()
        print(text, "done", flush=True)
