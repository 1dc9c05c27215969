"""The network of a case written plainly in PyTorch, which training steps are compared with: dense SDPA, or no attention.

Sizes, embedding, residual stream, optimizer and clipping are those of the case. Everything in a block is PyTorch's own:
nn.Linear, nn.LayerNorm, F.scaled_dot_product_attention, F.gelu and F.dropout under autocast.

Shapes: tokens [batch, n]; h [batch, n, width]; q, k, v [batch, heads, n, d].
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from longstride.model import ModelConfig
from longstride.model.config import BYTES
from longstride.training.capture import CapturedStep
from longstride.training.config import TrainConfig
from longstride.training.optimizer import make_optimizers

FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig, has_attention: bool) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.has_attention = has_attention
        self.sizes = [config.qk_width, config.qk_width, width]
        self.norm_attention, self.norm_ff = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, config.ff_width), nn.Linear(config.ff_width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.drop(self.project(self.attend(self.norm_attention(h))))
        return h + self.drop(self.outer(F.gelu(self.inner(self.norm_ff(h)))))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x

    def attend(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).split(self.sizes, -1)
        if not self.has_attention:
            return torch.as_tensor(parts[2])
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class PlainNetwork(nn.Module):
    def __init__(self, config: ModelConfig, has_attention: bool) -> None:
        super().__init__()
        self.precision = config.dtype
        self.recompute = config.recompute != "off"
        self.embedding, self.start = nn.Embedding(BYTES, config.width), nn.Parameter(torch.zeros(config.width))
        self.positions = nn.ModuleList(nn.Embedding(size, config.width) for size in config.positions.sizes)
        for number, index in enumerate(config.positions.indices(torch.arange(config.context))):
            self.register_buffer(f"index_{number}", index)
        self.blocks = nn.ModuleList(PlainBlock(config, has_attention) for _ in range(config.layers))
        self.norm, self.output = nn.LayerNorm(config.width), nn.Linear(config.width, BYTES, bias=False)
        nn.init.zeros_(self.output.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean nats of the bytes, each predicted from those before it."""
        before = self.embedding(tokens[:, :-1].int())
        h = torch.cat([self.start.expand(len(tokens), 1, -1), before], 1)
        for number, table in enumerate(self.positions):
            h = h + table(self.get_buffer(f"index_{number}"))
        h = h.to(self.precision)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=False) if self.recompute else block(h)
        return F.cross_entropy(self.output(self.norm(h)).flatten(0, 1).float(), tokens.flatten().long())


class PlainTraining:
    """Training steps of a plain network on random bytes."""

    def __init__(self, config: TrainConfig, device: torch.device, has_attention: bool) -> None:
        torch.manual_seed(config.seed)
        self.config, self.device, self.plain_because = config, device, ""
        self.network = PlainNetwork(config.model, has_attention).to(device)
        if config.compile:
            for block in self.network.blocks:
                block.compile(dynamic=False)
        self.optimizers = make_optimizers(self.network, config.optimizer)
        self.captured: CapturedStep | None = None
        if device.type == "cuda" and config.optimizer.name != "adafactor":
            self.captured = CapturedStep(self._compute, self.optimizers, device, self._note)
        shape = config.batch, config.model.context
        self.tokens = torch.randint(BYTES, shape, dtype=torch.uint8, device=device)
        self.last = torch.zeros(())

    def take_step(self, number: int) -> None:
        self.last = (self.captured or self._compute)(self.tokens)

    def finish(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return float(self.last)

    def close(self) -> None:
        pass

    def _note(self, reason: str) -> None:
        self.plain_because = reason

    def _compute(self, tokens: Tensor) -> Tensor:
        with _backends(self.device):
            total = torch.zeros((), device=self.device)
            for part in tokens.chunk(self.config.accumulate):
                with torch.autocast(self.device.type, self.network.precision, self.network.precision != torch.float32):
                    loss = self.network.loss(part) / self.config.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total


def _backends(device: torch.device) -> AbstractContextManager[Any]:
    return sdpa_kernel(FASTEST_FIRST, set_priority=True) if device.type == "cuda" else nullcontext()


def missing(config: ModelConfig) -> str | None:
    """Returns why the plain network cannot stand for that of the config; None if it can."""
    ours = {"norm": "layer", "qk_norm": False, "last_bytes": 1, "is_rotary": False}
    return next((f"the plain network has no {name}" for name, value in ours.items() if getattr(config, name) != value), None)
