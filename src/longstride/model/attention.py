"""attention(X) = W_p (attend(X, A)^(i)) over the heads i: the projections around `attend`."""

from collections.abc import Callable

from torch import Tensor, nn

from longstride import attention
from longstride.model.config import ModelConfig
from longstride.model.layers import Linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q, k, v, each [batch, heads, n, d], to [batch, heads, n, d_v]."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.patterns = config.patterns(block)
        self.sizes = (config.qk_width, config.qk_width, config.width)
        self.query_key_value = Linear(config.width, sum(self.sizes))
        self.project = Linear(config.width, config.width)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        """[batch, n, width] -> the same. `attend` stands in for the attention to this layer's patterns."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, n, d]
            for part in self.query_key_value(x).split(self.sizes, -1)
        )
        attended = attend(q, k, v) if attend else attention.attend(q, k, v, self.patterns)
        return self.project(attended.transpose(1, 2).flatten(2))
