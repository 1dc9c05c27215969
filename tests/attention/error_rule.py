"""The tolerance of every comparison with the oracle.

An implementation may be at most twice as far from float64 as plain PyTorch of its own precision is. Where plain PyTorch is
exact or nearly so by luck, as with a handful of numbers, a few roundings of the largest value in sight are allowed, in the
precision of the sums (float32 for half precision) and one more of the result itself.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride import attend
from longstride.patterns import Pattern

# Sums in another order differ by a few, and more where they cancel. One wrong pair shows a thousand times larger.
ROUNDINGS = 32


def results(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pattern: Pattern | Sequence[Pattern],
    scale: float | None = None,
) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    output = attend(*inputs, pattern, scale=scale, impl=impl)
    return [output.detach(), *torch.autograd.grad(output, inputs, slopes.to(output.dtype))]


def assert_within_the_rule(impl: str, q, k, v, slopes, pattern, scale=None) -> None:
    with Ran() as ran:
        ours = results(impl, q, k, v, slopes, pattern, scale)
    assert f"longstride.{impl}_forward" in ran.ops
    assert f"longstride.{impl}_backward" in ran.ops
    plain = results("reference", q, k, v, slopes, pattern, scale)
    exact = results("reference", *(x.double() for x in (q, k, v, slopes)), pattern, scale)
    assert_errors_within_the_rule(("output", "dq", "dk", "dv"), ours, plain, exact)


def assert_errors_within_the_rule(
    names: Sequence[str], ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """ours: of the implementation; plain: of plain PyTorch in the same precision; exact: in float64."""
    largest = max((x.abs().max().item() for x in exact if x.numel()), default=0)
    for name, our, same, true in zip(names, ours, plain, exact):
        assert our.dtype == same.dtype
        if not true.numel():
            continue
        sums = torch.promote_types(our.dtype, torch.float32)
        rounding = ROUNDINGS * torch.finfo(sums).eps + (torch.finfo(our.dtype).eps / 2 if sums != our.dtype else 0)
        allowed = 2 * distance(same, true) + rounding * largest
        assert distance(our, true) <= allowed, f"{name} is {distance(our, true):.3g} off, {allowed:.3g} are allowed"


def distance(x: Tensor, true: Tensor) -> float:
    assert x.isfinite().all()
    return (x.double() - true).abs().max().item()


class Ran(TorchDispatchMode):
    """Which operators ran: proof of the implementation that was used."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        self.ops.append(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))
