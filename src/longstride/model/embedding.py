"""embed(X, W_e): token embeddings, learned position embeddings, and the start vector.

The input at position i is byte i - 1, and the network predicts byte i there. So every byte is scored, the first from the
start vector alone. The position embedding is that of the byte to be predicted.
"""

import torch
from torch import Tensor, nn

from longstride.model.config import BYTES, ModelConfig


class Embedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.positions = config.positions
        self.token = nn.Embedding(BYTES, config.width)
        self.start = nn.Parameter(torch.empty(config.width))
        self.position = nn.ModuleDict(
            {name: nn.Embedding(size, config.width) for name, size in zip(self.positions.names, self.positions.sizes)}
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes [batch, n] -> H_0 [batch, n, width], float32."""
        batch, n = tokens.shape
        shifted = torch.cat([self.start.expand(batch, 1, -1), self.token(tokens[:, :-1].long())], 1)
        return self._add_positions(shifted, torch.arange(n, device=tokens.device))

    def after(self, tokens: Tensor | None, batch: int, position: Tensor) -> Tensor:
        """Returns [batch, 1, width] for one position, from the bytes before it [batch]; None before the first."""
        before = self.start.expand(batch, -1) if tokens is None else self.token(tokens.long())
        return self._add_positions(before[:, None], position)

    def _add_positions(self, x: Tensor, position: Tensor) -> Tensor:
        for name, index in zip(self.positions.names, self.positions.indices(position)):
            x = x + self.position[name](index)
        return x
