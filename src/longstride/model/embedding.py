"""embed(X, W_e): token embeddings, learned position embeddings, and the start vector.

The input at position i is byte i - 1, and the network predicts byte i there. So every byte is scored, the first from the
start vector alone. The position embedding is that of the byte to be predicted. With `last_bytes` = 3, bytes i - 2 and i - 3
are added, each by a table of its own; nothing is added for a byte before the first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstride.model.config import BYTES, ModelConfig
from longstride.model.layers import HALF, has_hooks, rms_norm
from longstride.model.rotary import rotation
from longstride.model.table_gradient import embed_last_bytes, lookup, uses_products


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.positions = config.positions
        self.rotated_size = config.qk_width // config.heads if config.is_rotary else 0
        self.rotation_dtype = torch.promote_types(config.dtype, torch.float32)
        self.normalized = config.norm == "rms"
        self.token = Table(BYTES, config.width)
        self.start = nn.Parameter(torch.empty(config.width))
        self.position = nn.ModuleDict(
            {name: Table(size, config.width) for name, size in zip(self.positions.names, self.positions.sizes)}
        )
        self.earlier = nn.ModuleList(Table(BYTES, config.width) for _ in range(config.last_bytes - 1))
        """Tables of the bytes before the last, the nearest first."""

    def forward(self, tokens: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Bytes [batch, n] -> H_0 [batch, n, width], summed in float32 and rounded to `dtype`; by default not rounded."""
        batch, n = tokens.shape
        rounded = dtype if dtype in HALF and not self.normalized else None
        tables = [self.token, *self.earlier]
        if all(type(table) is Table and not has_hooks(table) and uses_products(table.weight) for table in tables):
            shifted = embed_last_bytes(tokens, self.start, [table.weight for table in tables], rounded)
        else:
            shifted = torch.cat([self.start.expand(batch, 1, -1), _rows(self.token, tokens[:, :-1], rounded)], 1)
            for distance, table in enumerate(self.earlier, 2):
                if distance < n:
                    shifted = shifted + F.pad(_rows(table, tokens[:, :-distance], rounded), (0, 0, distance, 0))
        for name, index in zip(self.positions.names, self.positions.indices(torch.arange(n, device=tokens.device))):
            shifted = shifted + self.position[name](index)
        found = rms_norm(shifted) if self.normalized else shifted
        return found if dtype is None else found.to(dtype)

    def rotation(self, position: Tensor) -> Tensor | None:
        """Returns the rotation of queries and keys at these positions [n]; None if positions are not rotary."""
        return rotation(position, self.rotated_size, self.rotation_dtype) if self.rotated_size else None


def _rows(table: nn.Module, index: Tensor, rounded: torch.dtype | None) -> Tensor:
    """Returns the table's rows. Another module in its place knows nothing of how the sum is rounded."""
    return table(index.long(), rounded) if type(table) is Table else table(index.long())


class Table(nn.Embedding):
    """Rows by their index."""

    def forward(self, index: Tensor, rounded: torch.dtype | None = None) -> Tensor:
        """[...] -> [..., width]. `rounded`: a half precision in which the gradient of the result is exact, since the result
        is only added to others and then rounded to it."""
        if uses_products(self.weight):
            return lookup(self.weight, index, rounded)
        return super().forward(index)
