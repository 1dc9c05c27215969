"""A call of the operator as on a Hopper GPU, its kernels emulated on a CPU, and what it should give."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from longstride.attention.kernels import call, general
from longstride.attention.kernels.call import Backward, Forward, Layout, make_plan
from longstride.attention.kernels.hopper import choice, launch
from longstride.attention.kernels.run import LOG2_E
from longstride.patterns import notation
from tests.attention.kernels.hopper.emulation import emulated
from tests.attention.layouts import oracle


class Call:
    """float64 tensors stand for half precision. rows: of each, the lengths of its documents; one: no documents. apart: the
    heads of a position are side by side in memory."""

    def __init__(
        self, patterns: str, rows: Sequence[Sequence[int]], heads: int, d_qk: int, d_v: int, apart: bool = False
    ) -> None:  # fmt: skip
        few = notation.parse(patterns)
        self.heads, self.rows, self.apart = few * (heads // len(few)), rows, apart
        documents = rows[0] if all(row == rows[0] for row in rows) else [length for row in rows for length in row]
        self.layout = Layout(tuple(documents)) if len(documents) > 1 else None
        generator = torch.Generator().manual_seed(0)
        shapes = [(len(rows), heads, sum(rows[0]), d) for d in (d_qk, d_qk, d_v, d_v)]
        self.inputs = [self.laid_out(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        """q, k and v, and the gradient of the output."""
        self.kernels: list[str] = []
        """Those of the Hopper backend that ran last."""

    def laid_out(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.apart else x

    def run(self, inputs: Sequence[Tensor], programs: int | None = None, late: bool = True) -> list[Tensor]:
        """Output, lse in bits, dq, dk and dv. programs: of each Gluon kernel, instead of what its launch says."""
        q, k, v, slopes = inputs
        scale = q.shape[3] ** -0.5
        output, *gradients = (self.laid_out(torch.full_like(x, torch.nan)) for x in (v, q, k, v))
        lse = torch.full(q.shape[:3], torch.nan, dtype=torch.float64)
        patterns = notation.write(self.heads)

        with (
            patch.object(call, "backends", lambda device: (launch, general)),
            patch.object(launch, "fits_tma", lambda *_: True),
            patch.object(choice, "LEAST_DOCUMENT", 1),
            emulated(late, programs) as self.kernels,
        ):
            tensors = q, k, v, output, lse
            make_plan(Forward, tensors, (scale * LOG2_E,), patterns, False, self.layout).run(tensors)
            tensors = q, k, v, slopes, output, lse, *gradients
            settings = scale * LOG2_E, scale, True, True
            make_plan(Backward, tensors, settings, patterns, False, self.layout).run(tensors)
        return [output, lse, *gradients]

    def expected(self) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in self.inputs[:3]]
        output, lse = oracle(*leaves, self.heads, 0, self.rows)
        return [output.detach(), lse.detach() * LOG2_E, *torch.autograd.grad(output, leaves, self.inputs[3])]
