"""What a backend computes: one pass of a pattern over these tensors, forward or backward.

A backend is a module with two functions, which return the launches for a pass, or None if they cannot compute it:

    forward(call: Forward, pass_: Pass, accumulate: bool) -> list[Launch] | None
    backward(call: Backward, pass_: Pass, accumulate: bool) -> list[Launch] | None

`accumulate`: an earlier pass has computed other keys of the same queries, and this one adds to its results. Tensors are
[batch, heads, n, d] with any strides; only the last dimension is contiguous.
"""

from typing import NamedTuple

from torch import Tensor

from longstride.attention.kernels.launch import Workspace


class Forward(NamedTuple):
    """Fills output and lse [batch, heads, n], the log-sum-exp of each query's scores in base 2, float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor
    scale: float
    """The softmax scale times log2(e), for scores in base 2; positive."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:5]


class Backward(NamedTuple):
    """Fills dq, dk and dv."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_output: Tensor
    output: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scale: float
    """As in `Forward`."""
    softmax_scale: float
    need_q: bool
    need_kv: bool
    workspace: Workspace

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:9]

    @property
    def scales(self) -> tuple[float, float]:
        return self.scale, self.softmax_scale
