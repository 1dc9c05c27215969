"""Attention layer: attention(X) = W_p (attend(X, A)^(i)) over the heads i, the projections around `attend`."""

from collections.abc import Callable

from torch import Tensor, nn

from longstride.attention import attend as attend_over
from longstride.model.config import ModelConfig
from longstride.model.layers import Linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [batch, heads, n, d] -> [batch, heads, n, d_v]."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.patterns = config.patterns(block)
        self.sizes = (config.qk_width, config.qk_width, config.width)
        self.query_key_value = Linear(config.width, sum(self.sizes))
        self.project = Linear(config.width, config.width)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        """[batch, n, width] -> [batch, n, width]. `attend` replaces the operator, e.g. to record keys or to use a cache."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, n, d]
            for part in self.query_key_value(x).split(self.sizes, -1)
        )
        attend = attend or self.attend
        return self.project(attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_over(q, k, v, self.patterns)
