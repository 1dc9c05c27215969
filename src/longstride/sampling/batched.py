"""Many streams on a GPU: a step is a CUDA graph of matrix products and the kernels between them.

A step reads the weights once for all streams.
"""

from typing import Any

import torch
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.sampling.kernel_streams import KernelStreams, next_power_of_2
from longstride.sampling.kernels.arguments import (
    AttentionSizes,
    BlockCache,
    BlockWeights,
    Choice,
    Norm,
    ProductSizes,
    Streams,
)
from longstride.sampling.kernels.batched import (
    add_and_normalize,
    attend_cached,
    begin_step,
    end_step,
    merge_parts,
    multiply,
)
from longstride.sampling.kernels.cached_attention import SoftmaxState, constants
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.params import SamplingParams

TERMS = 3
"""bfloat16 terms whose sum has the 24 bits of a float32; weights in half precision need fewer."""
WEIGHT_TERMS = {"bfloat16": 1, "float16": 2}
TILE, STAGES, ATTENTION_WARPS = 16, 4, 2
"""Attention: keys per tile, tiles in flight, and warps per program."""
PROGRAMS = 512
"""Attention programs to aim for: the keys of a head are split if all streams have fewer heads."""
ROWS, COLUMNS, BLOCK_IN = (16, 64), (64, 32, 16), 64
"""Tile of a product: the least and the most rows (streams), candidate column counts, and inputs per iteration."""
PRODUCT_PROGRAMS = 96
"""Programs per product to aim for: with fewer, first the input is split (split-K), then tiles get narrower."""
MOST_SHARES, LEAST_SHARE = 8, 128
"""The most parts that an input is split into, and the least length of a part."""


class BatchedStreams(KernelStreams):
    """`Streams` of any number, with one CUDA graph per step."""

    is_async = False  # Launching a step may take as long as running it.

    def __init__(self, model: SparseTransformer, batch: int, length: int) -> None:
        config = model.config
        # Triton's interpreter is silently wrong for bfloat16.
        self.dtype = torch.bfloat16 if next(model.parameters()).device.type == "cuda" else torch.float32
        weight_terms = WEIGHT_TERMS.get(config.precision, TERMS)
        super().__init__(model, batch, length, lambda weight: in_terms(weight, weight_terms, self.dtype))
        heads = batch * config.heads
        # A split has at least one tile of keys, or nothing to do.
        self.splits = min(next_power_of_2(-(-PROGRAMS // heads)), next_power_of_2(-(-self.tables.most // TILE)))
        self.visible = self.visible_slots(1)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.streams = Streams(
            self.tokens, zeros(batch, dtype=torch.int32), zeros(batch, dtype=torch.int64), self.last_bytes
        )  # fmt: skip
        self.choice = Choice(zeros(1), zeros(1, dtype=torch.int32), zeros(1))
        self.parts = SoftmaxState(*(zeros(heads, self.splits, *more) for more in ((), (), (self.d_v,))))
        self.h = zeros(batch, config.width)
        self.x = zeros(TERMS, batch, config.width, dtype=self.dtype)
        self.logits = zeros(batch, BYTES.value)
        self.graphs: dict[bool, Any] = {}

    @torch.inference_mode()
    def extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> Tensor:
        self.streams.prompt_lengths.copy_(prompt_lengths)
        self.streams.random_states.copy_(state)
        self.visible.position.fill_(self.position)
        self.choice.temperature.fill_(params.temperature)
        self.choice.top_k.fill_(params.top_k or BYTES.value)
        self.choice.top_p.fill_(params.top_p or 1.0)
        with self.device_context():
            for _ in range(steps):
                self._replay(params.has_filter)
        self.position += steps
        return self.tokens[:, self.position - steps : self.position]

    def _replay(self, has_filter: bool) -> None:
        """Runs a step, from the second one on by its CUDA graph."""
        if self.device.type != "cuda":
            self._step(has_filter)
        elif has_filter in self.graphs:
            self.graphs[has_filter].replay()
        else:  # The first step runs directly, so that all kernels are compiled before the graph is captured.
            self._step(has_filter)
            self.graphs[has_filter] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(has_filter)

    def _step(self, has_filter: bool) -> None:
        """Launches the kernels of one step: embedding, blocks, logits, and the choice of a byte per stream."""
        weights, position, batch = self.weights, self.visible.position, self.batch
        self.list_seen(self.visible, len(position))
        begin_step[(batch,)](self.last_bytes, position, weights.embedding, self.h, NETWORK=self.network, EACH=self.each)
        added, bias = self.h[None], weights.blocks.outer.bias[0]
        for layer in range(self.config.layers):
            block = _block_weights(weights.blocks, layer)
            self._normalize(added, bias, block.norm_attention, self.x, layer > 0)
            self._attend(layer, self._product(self.x, block.query_key_value.weight), block.query_key_value.bias)
            added = self._product(self.x, block.project.weight)
            self._normalize(added, block.project.bias, block.norm_ff, self.x, True)
            inner = self._product(self.x, block.inner.weight, block.inner.bias)
            added, bias = self._product(inner, block.outer.weight), block.outer.bias
        x = torch.empty_like(self.h)
        self._normalize(added, bias, weights.norm, x[None], True)
        torch.mm(x, weights.output.T, out=self.logits)
        self._choose(has_filter)

    def _choose(self, has_filter: bool) -> None:
        """Chooses a byte for each stream by its logits, and moves on."""
        position = self.visible.position
        end_step[(self.batch,)](self.logits, self.streams, self.length, position, self.choice, FILTERED=has_filter)
        position += 1

    def _attend(self, layer: int, qkv: Tensor, bias: Tensor) -> None:
        """Writes the attention of all heads of a block to self.x, and its new keys and values to the cache."""
        cache = BlockCache(self.cache.keys[layer], self.cache.values[layer], self.cache.slots[layer])
        lists = (self.visible.slots, self.visible.counts, self.visible.own)
        rows = len(self.visible.position) * self.tables.cycle
        slots, counts, own = (x.view(rows, -1)[layer % self.tables.cycle :] for x in lists)
        visible = self.visible._replace(slots=slots, counts=counts, own=own)
        sizes = AttentionSizes(len(qkv), TERMS, self.splits, TILE, STAGES, self.each)
        heads = self.batch * self.config.heads
        attend_cached[(heads * self.splits,)](
            qkv, bias, cache, visible, self.parts, self.x, self.batch, NETWORK=self.network, HEAD=self.head,
            SIZES=constants(sizes), num_warps=ATTENTION_WARPS,
        )  # fmt: skip
        if self.splits > 1:
            merge_parts[(heads,)](
                self.parts, self.x, self.batch, NETWORK=self.network, HEAD=self.head, SPLITS=self.splits, TERMS=TERMS
            )  # fmt: skip

    def _normalize(self, added: Tensor, bias: Tensor, norm: Norm, x: Tensor, add: bool) -> None:
        """h += sum(added) + bias, if `add`; x = norm(h)."""
        add_and_normalize[(self.batch,)](
            self.h, added, bias, norm, x, self.batch, ADD=add, SHARES=len(added), TERMS=len(x), NETWORK=self.network
        )  # fmt: skip

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weight^T in float32 as [shares, batch, out], to be summed over the shares of a split input; with a bias,
        gelu(x weight^T + bias) in TERMS, as x is."""
        weight_terms, size_out, size_in = weight.shape
        activate = bias is not None
        rows, columns, share = product_tile(self.batch, size_in, size_out, whole=activate)
        shares = -(-size_in // share)
        out = torch.empty(
            TERMS if activate else shares, self.batch, size_out, dtype=x.dtype if activate else torch.float32,
            device=self.device,
        )  # fmt: skip
        sizes = ProductSizes(size_in, size_out, TERMS, weight_terms, rows, columns, share, BLOCK_IN)
        multiply[(-(-self.batch // rows), -(-size_out // columns), shares)](
            x, weight, bias if activate else weight, out, self.batch, SIZES=constants(sizes), ACTIVATE=activate
        )  # fmt: skip
        return out


def _block_weights(blocks: BlockWeights, layer: int) -> BlockWeights:
    """Returns the weights of one block, from those of all blocks stacked."""
    groups: Any = blocks
    return BlockWeights(*(type(group)(*(x[layer] for x in group)) for group in groups))


def product_tile(batch: int, size_in: int, size_out: int, whole: bool) -> tuple[int, int, int]:
    """Returns a program's tile of a product: rows, columns, and the length of its share of the input; the whole input if
    `whole`."""
    rows = min(max(next_power_of_2(batch), ROWS[0]), ROWS[1])
    down = -(-batch // rows)
    for columns in COLUMNS:
        shares, tiles = 1, down * -(-size_out // columns)
        while (
            not whole and shares * tiles < PRODUCT_PROGRAMS and shares < MOST_SHARES and size_in >= 2 * shares * LEAST_SHARE
        ):
            shares *= 2
        if shares * tiles >= PRODUCT_PROGRAMS:
            break
    return rows, columns, -(-size_in // (shares * BLOCK_IN)) * BLOCK_IN


def in_terms(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Splits x, [layers, ...], into terms of a smaller dtype whose sum approximates x: [layers, count, ...]."""
    terms = [x.to(dtype)]
    for _ in range(count - 1):
        x = x - terms[-1]
        terms.append(x.to(dtype))
    return torch.stack(terms, 1)
