"""Times of the feed-forward network's products with gelu inside, beside cuBLAS and kernels for gelu, on a Hopper GPU.

    python benchmarks/feed_forward.py
    python benchmarks/feed_forward.py 98304,512,2048 49152,256,512

A shape is rows, width and inner width. Microseconds of a call, the fastest of four rounds of ten.
"""

from argparse import ArgumentParser
from collections.abc import Callable

import torch
import torch.nn.functional as F

from longstride.model import feed_forward  # noqa: F401  Defines the operators.

SHAPES = ("98304,512,2048", "49152,256,512", "49152,256,1024")
ops = torch.ops.longstride_model


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    columns = ("cuBLAS", "with gelu", "inside") * 2
    print(f"{'rows, width, inner width':26}" + "".join(f"{name:>11}" for name in columns) + "   forward, then backward")
    for shape in parser.parse_args().shapes:
        print(f"{shape:26}" + "".join(f"{time:11.1f}" for time in measure(*map(int, shape.split(",")))))


def measure(rows: int, width: int, inner: int) -> list[float]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, d_output, bias = some(rows, width), some(rows, width), torch.randn(inner, device="cuda")
    weight_1, weight_2 = some(inner, width) / width**0.5, some(width, inner) / width**0.5
    z = F.linear(x, weight_1)
    return [
        timed(lambda: F.linear(x, weight_1)),
        timed(lambda: ops.bias_gelu(F.linear(x, weight_1), bias)),
        timed(lambda: ops.product_gelu(x, weight_1, bias, True)),
        timed(lambda: d_output @ weight_2),
        timed(lambda: ops.bias_gelu_backward(d_output @ weight_2, z, bias)),
        timed(lambda: ops.product_gelu_backward(d_output, weight_2, z, True)),
    ]


def timed(call: Callable[[], object], calls: int = 10) -> float:
    times = []
    for _ in range(5):  # The first round warms up.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return min(times[1:])


if __name__ == "__main__":
    main()
