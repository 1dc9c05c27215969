"""What streams that kernels make have in common, be they few or many."""

from contextlib import AbstractContextManager, nullcontext
from math import e, log2, sqrt

import torch
from torch import Tensor

from longstride.attention.kernels.cached import list_seen
from longstride.model import SparseTransformer
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.common import START
from longstride.sampling.tables import Tables, Weights, head_blocks

LIST_BLOCK = 256
"""Keys of a leaf that a program of `list_seen` writes."""


class KernelStreams:
    """Streams from the beginning on, all at the same position."""

    def __init__(self, model: SparseTransformer, batch: int, length: int, dtype: torch.dtype, readers: int = 1) -> None:
        """dtype: of the weights of products. readers: of the byte before, each with a place of its own."""
        config = model.config
        self.config, self.batch, self.length = config, batch, length
        self.device = next(model.parameters()).device
        self.model = in_float32(model)
        self.cache = make_cache(model, batch, length)
        self.weights = Weights(self.model, dtype, self.device).tensors
        self.tables = Tables(self.cache, self.device)
        self.d_qk, self.d_v = config.qk_width // config.heads, config.width // config.heads
        self.block_qk, self.block_v = head_blocks(config)
        self.scale = log2(e) / sqrt(self.d_qk)
        self.position = 0
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.device)
        self.chosen = torch.full((readers, batch), START.value, dtype=torch.int32, device=self.device)

    def prefill(self, tokens: Tensor) -> None:
        """Takes in the first n bytes."""
        n = tokens.shape[1]
        if n:
            prefill(self.model, self.cache, tokens)
            self.tokens[:, :n] = tokens
            self.chosen[:] = tokens[:, -1]
        self.position = n

    def list_seen(self, first: Tensor, positions: int, lists: dict[str, Tensor]) -> None:
        """Fills lists of what queries see, seen, counts and own, from position `first` on."""
        tables = self.tables
        list_seen[(positions * len(tables.heads), -(-tables.most // LIST_BLOCK))](
            tables.table, first, **lists, most=tables.most, HEADS=len(tables.heads), LEAVES=tables.leaves,
            BLOCK_SIZE=LIST_BLOCK,
        )  # fmt: skip

    def on_its_device(self) -> AbstractContextManager[object]:
        """Where kernels are launched."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
