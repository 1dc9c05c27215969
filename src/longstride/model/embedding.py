"""embed(X, W_e): tokens, learned embeddings of their positions, and the start vector.

Slot i of the network carries the byte before it, i - 1, and predicts byte i; so every byte is scored, the first from the
start vector alone. The position that is added is the slot's own: that of the byte to be predicted.
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
        return self._placed(shifted, torch.arange(n, device=tokens.device))

    def after(self, tokens: Tensor | None, batch: int, position: Tensor) -> Tensor:
        """[batch, 1, width] of one slot, from the bytes before it [batch], or none before the first."""
        before = self.start.expand(batch, -1) if tokens is None else self.token(tokens.long())
        return self._placed(before[:, None], position)

    def _placed(self, x: Tensor, position: Tensor) -> Tensor:
        for name, index in zip(self.positions.names, self.positions.indices(position)):
            x = x + self.position[name](index)
        return x
