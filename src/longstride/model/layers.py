"""Linear maps and norms with float32 weights, whatever the activations are."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 1.702
EPSILON = 1e-5


class Linear(nn.Linear):
    """Computes in the dtype of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    """Layer normalization, computed in float32 at least."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """The paper's form of it: x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(SLOPE * x)
