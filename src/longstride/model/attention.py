"""Attention layer: attention(X) = W_p (attend(X, A)^(i)) over the heads i, the projections around `attend`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longstride.attention.api import attend as attend_over
from longstride.attention.api import attend_packed, unpack
from longstride.model import query_key
from longstride.model.config import ModelConfig
from longstride.model.layers import Linear
from longstride.model.residual import Product, linear, product

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [batch, heads, n, d] -> [batch, heads, n, d_v]."""


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
        packed = linear(x, self.query_key_value)
        d_qk = self.sizes[0] // self.heads
        is_ready = rotation is None and self.query_scale is None
        if attend is None and not is_ready and query_key.is_fused(packed, d_qk):
            packed = query_key.normalize_and_rotate_packed(packed, rotation, self.query_scale, d_qk, self.heads)
            is_ready = True
        if attend is None and is_ready:
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
        scale = None if self.query_scale is None else self.query_scale[heads]
        q, k = query_key.normalize_and_rotate(q, k, rotation, scale)
        return q.to(packed.dtype), k.to(packed.dtype), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_over(q, k, v, self.patterns)
