"""Forward and backward pass of `attend` as plain functions, for a caller that keeps and frees the tensors itself.

They compute what `attend` with impl "auto" and its gradient compute, and save nothing.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.attention.api import choose
from longstride.patterns import Pattern, notation


def attend_forward(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern]) -> tuple[Tensor, ...]:
    """Returns the output [batch, heads, n, d_v], and the tensors by query that `attend_backward` needs."""
    results: tuple[Tensor, ...] = _operator("forward", q)(q, k, v, notation.write(heads), 1 / sqrt(q.shape[3]))
    return results


def attend_backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Sequence[Tensor], heads: Sequence[Pattern]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v. `results`: of `attend_forward`."""
    gradients: tuple[Tensor, Tensor, Tensor] = _operator("backward", q)(
        d_output, q, k, v, *results, notation.write(heads), 1 / sqrt(q.shape[3]), [True] * 3
    )
    return gradients


def _operator(direction: str, q: Tensor) -> Any:
    impl = choose("auto", q.device).impl
    if impl == "triton":
        import longstride.attention.kernels.ops  # noqa: F401  # Defines the operators.
    return getattr(torch.ops.longstride, f"{impl}_{direction}").default
