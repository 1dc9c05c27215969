"""Attention layer: attention(X) = W_p (attend(X, A)^(i)) over the heads i, the projections around `attend`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longstride.attention.api import attend as attend_over
from longstride.attention.api import attend_packed, unpack
from longstride.model.config import ModelConfig
from longstride.model.layers import Linear, rms_norm
from longstride.model.residual import Product, product
from longstride.model.rotary import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [batch, heads, n, d] -> [batch, heads, n, d_v]."""
QK_FACTOR = 3.0
"""Normalised queries and keys have a root mean square of 1. This factor makes their softmax sharp enough to begin with."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.heads = config.heads
        self.patterns = config.patterns(block)
        self.sizes = (config.qk_width, config.qk_width, config.width)
        has_bias = config.norm == "layer"
        self.query_key_value = Linear(config.width, sum(self.sizes), bias=has_bias)
        self.project = Linear(config.width, config.width, bias=has_bias)
        self.query_scale = nn.Parameter(torch.ones(config.heads)) if config.qk_norm else None

    def forward(self, x: Tensor, attend: Attend | None = None, rotation: Tensor | None = None) -> Product:
        """[batch, n, width] -> [batch, n, width]. `attend` replaces the operator, e.g. to record keys or to use a cache; it
        gets queries and keys as they are multiplied, normalised and rotated. `rotation`: from `rotary.rotation`, if the
        network has rotary positions."""
        packed = self.query_key_value(x)
        if attend is None and rotation is None and self.query_scale is None:
            attended = attend_packed(packed, self.sizes, self.patterns)
        else:
            attended = (attend or self.attend)(*self.split(packed, rotation))
        return product(attended.transpose(1, 2).flatten(2), self.project)

    def split(
        self, packed: Tensor, rotation: Tensor | None = None, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns queries, keys and values [batch, heads, n, d] from the results of `query_key_value` for these heads."""
        count = len(range(self.heads)[heads])
        q, k, v = unpack(packed, tuple(size // self.heads * count for size in self.sizes), count)
        if self.query_scale is not None:
            q = rms_norm(q) * (QK_FACTOR * self.query_scale[heads])[:, None, None]
            k = rms_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q.to(packed.dtype), k.to(packed.dtype), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_over(q, k, v, self.patterns)
