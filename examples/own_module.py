"""Sparse attention in your own nn.Module: a small causal layer that learns to copy the token 64 positions back.

python examples/own_module.py --n 1024 --steps 200
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride import Dilated, Local, attend

TOKENS, STRIDE = 16, 64


class SparseAttention(nn.Module):
    """Residual attention. Half of the heads see the last 64 positions, half only the position 64 back and their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.patterns = [Local(STRIDE)] * (heads // 2) + [Dilated(STRIDE, STRIDE)] * (heads - heads // 2)

    def forward(self, x: Tensor) -> Tensor:  # [batch, n, width]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [batch, heads, n, d]
        return x + self.out(attend(q, k, v, self.patterns).transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1024, help="sequence length")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(TOKENS, 64), SparseAttention(64, 4), nn.Linear(64, TOKENS)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, options.steps + 1):
        tokens = torch.randint(TOKENS, (4, options.n), device=device)
        logits = model(tokens)[:, STRIDE:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-STRIDE].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == options.steps:
            print(f"step {step}: {loss.item():.3f} nats")


if __name__ == "__main__":
    main()
