"""Many streams on a GPU: a step is a CUDA graph of matrix products and the kernels between them.

A step reads the weights once for all streams.
"""

from typing import Any

import torch
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.sampling.kernel_streams import PRODUCTS, KernelStreams, next_power_of_2
from longstride.sampling.kernels.batched import (
    add_and_normalize,
    begin_step,
    end_step,
    join_parts,
    keep_and_look,
    multiply,
)
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.sampler import SamplingParams

PARTS = 3
"""bfloat16 terms whose sum has the 24 bits of a float32; weights in half precision need fewer."""
WEIGHT_PARTS = {"bfloat16": 1, "float16": 2}
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
        super().__init__(model, batch, length, torch.float32)
        # Triton's interpreter is silently wrong for bfloat16.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        for name in PRODUCTS:
            self.weights[name] = in_parts(self.weights[name], WEIGHT_PARTS.get(config.precision, PARTS), self.dtype)
        heads = batch * config.heads
        # A split has at least one tile of keys, or nothing to do.
        self.splits = min(next_power_of_2(-(-PROGRAMS // heads)), next_power_of_2(-(-self.tables.most // TILE)))
        lists = len(self.tables.heads)
        integers = {"prompt_lengths": batch, "position": 1, "top_k": 1, "counts": lists, "own": lists}
        integers["seen"] = lists * self.tables.most
        self.integers = {name: torch.zeros(size, dtype=torch.int32, device=self.device) for name, size in integers.items()}
        self.state = torch.zeros(batch, dtype=torch.int64, device=self.device)
        buffers = {"part_top": heads, "part_total": heads, "part_result": heads * self.d_v}
        self.buffers = {name: torch.zeros(size * self.splits, device=self.device) for name, size in buffers.items()}
        self.buffers |= {name: torch.ones(1, device=self.device) for name in ("temperature", "top_p")}
        self.h = torch.zeros(batch, config.width, device=self.device)
        self.x = torch.zeros(PARTS, batch, config.width, dtype=self.dtype, device=self.device)
        self.logits = torch.zeros(batch, BYTES.value, device=self.device)
        self.graphs: dict[bool, Any] = {}

    @torch.inference_mode()
    def extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> Tensor:
        self.integers["prompt_lengths"].copy_(prompt_lengths)
        self.state.copy_(state)
        self.integers["position"].fill_(self.position)
        self.integers["top_k"].fill_(params.top_k or BYTES.value)
        self.buffers["temperature"].fill_(params.temperature)
        self.buffers["top_p"].fill_(params.top_p or 1.0)
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
        config, tables, weights, integers, batch = self.config, self.tables, self.weights, self.integers, self.batch
        lists = {name: integers[name] for name in ("seen", "counts", "own")}
        by_entry = [{name: x.view(tables.cycle, -1)[entry] for name, x in lists.items()} for entry in range(tables.cycle)]
        parts = {name: self.buffers[name] for name in ("part_top", "part_total", "part_result")}
        self.list_seen(integers["position"], 1, lists)
        begin_step[(batch,)](
            self.chosen, integers["position"], weights["token_table"], weights["place_table"], weights["places"], self.h,
            W=config.width, DIMENSIONS=len(config.positions.sizes), BLOCK_W=next_power_of_2(config.width),
        )  # fmt: skip
        added, bias = self.h[None], weights["outer_bias"][0]
        for number in range(config.layers):
            own = {name: x[number] for name, x in weights.items() if name in BLOCK_WEIGHTS}
            self._normalize(added, bias, own["norm_1"], own["shift_1"], self.x, number > 0)
            qkv = self._product(self.x, own["qkv_weight"])
            keep_and_look[(batch * config.heads * self.splits,)](
                qkv, own["qkv_bias"], self.cache.keys[number], self.cache.values[number], self.cache.slots[number],
                **by_entry[number % tables.cycle], most=tables.most, **parts, x=self.x, batch=batch,
                scale=self.scale, H=config.heads, D_QK=self.d_qk, D_V=self.d_v, SHARES=len(qkv), PARTS=PARTS,
                SPLITS=self.splits, TILE=TILE, STAGES=STAGES, BLOCK_QK=self.block_qk, BLOCK_V=self.block_v,
                num_warps=ATTENTION_WARPS,
            )  # fmt: skip
            if self.splits > 1:
                join_parts[(batch * config.heads,)](
                    **parts, x=self.x, batch=batch, H=config.heads, D_V=self.d_v, SPLITS=self.splits, PARTS=PARTS,
                    BLOCK_V=self.block_v,
                )  # fmt: skip
            added = self._product(self.x, own["project_weight"])
            self._normalize(added, own["project_bias"], own["norm_2"], own["shift_2"], self.x, True)
            inner = self._product(self.x, own["inner_weight"], own["inner_bias"])
            added, bias = self._product(inner, own["outer_weight"]), own["outer_bias"]
        x = torch.empty_like(self.h)
        self._normalize(added, bias, weights["norm_last"], weights["shift_last"], x[None], True)
        torch.mm(x, weights["output_weight"].T, out=self.logits)
        end_step[(batch,)](
            self.logits, self.tokens, integers["prompt_lengths"], self.state, integers["position"], self.length,
            self.buffers["temperature"], integers["top_k"], self.buffers["top_p"], self.chosen, FILTERED=has_filter,
        )  # fmt: skip
        integers["position"] += 1

    def _normalize(self, added: Tensor, bias: Tensor, norm: Tensor, shift: Tensor, x: Tensor, add: bool) -> None:
        """h += sum(added) + bias, if `add`; x = norm(h)."""
        width = self.config.width
        add_and_normalize[(self.batch,)](
            self.h, added, bias, norm, shift, x, self.batch, ADD=add, W=width, SHARES=len(added), PARTS=len(x),
            BLOCK_W=next_power_of_2(width),
        )  # fmt: skip

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x weight^T in float32 as [shares, batch, out], to be summed over the shares of a split input; with a bias,
        gelu(x weight^T + bias) in PARTS terms, as x is."""
        of, size_out, size_in = weight.shape
        activate = bias is not None
        rows, columns, share = product_tile(self.batch, size_in, size_out, whole=activate)
        shares = -(-size_in // share)
        out = torch.empty(
            PARTS if activate else shares, self.batch, size_out, dtype=x.dtype if activate else torch.float32,
            device=self.device,
        )  # fmt: skip
        multiply[(-(-self.batch // rows), -(-size_out // columns), shares)](
            x, weight, bias if activate else weight, out, self.batch, ACTIVATE=activate, PARTS=PARTS, OF=of,
            IN=size_in, OUT=size_out, ROWS=rows, COLUMNS=columns, SHARE=share, BLOCK_IN=BLOCK_IN,
        )  # fmt: skip
        return out


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


def in_parts(x: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """Splits x, [layers, ...], into `parts` terms of a smaller dtype whose sum approximates x: [layers, parts, ...]."""
    terms = [x.to(dtype)]
    for _ in range(parts - 1):
        x = x - terms[-1]
        terms.append(x.to(dtype))
    return torch.stack(terms, 1)


BLOCK_WEIGHTS = {
    "norm_1", "shift_1", "qkv_weight", "qkv_bias", "project_weight", "project_bias", "norm_2", "shift_2", "inner_weight",
    "inner_bias", "outer_weight", "outer_bias",
}  # fmt: skip
