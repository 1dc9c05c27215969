"""Many streams on a GPU: a step is products and the kernels between them, launched as one CUDA graph.

Streams are computed together, so a step reads the weights once for all of them.
"""

from typing import Any

import torch
from torch import Tensor

from longstride.model import SparseTransformer
from longstride.sampling.choose import Choice
from longstride.sampling.kernel_streams import KernelStreams
from longstride.sampling.kernels.batched import (
    add_and_normalize,
    begin_step,
    end_step,
    join_parts,
    keep_and_look,
    multiply,
)
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.tables import PRODUCTS, power_above

PARTS = 3
"""bfloat16 numbers that have the 24 bits of a float32 one; fewer are enough for a weight in half precision."""
WEIGHT_PARTS = {"bfloat16": 1, "float16": 2}
TILE, STAGES, LOOK_WARPS = 16, 4, 2
"""Keys that a program looks at together, tiles of them that are on their way at once, and its warps."""
PROGRAMS = 512
"""Into as many the heads of all streams are split, if there are fewer."""
ROWS, COLUMNS, BLOCK_IN = (16, 64), (64, 32, 16), 64
"""Streams, at least and at most, and columns of a product's result that a program has; numbers of its input at a time."""
ENOUGH = 96
"""Programs of a product; else each has only a share of its input, and then fewer columns."""
SHARES, SHARE = 8, 128
"""Shares of an input, at most, if that leaves each of them so long."""


class Batched(KernelStreams):
    """Many of them."""

    returns_early = False  # A step may take as long to launch as to run.

    def __init__(self, model: SparseTransformer, batch: int, length: int) -> None:
        config = model.config
        super().__init__(model, batch, length, torch.float32)
        # Triton's interpreter is silently wrong for bfloat16.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        for name in PRODUCTS:
            self.weights[name] = in_parts(self.weights[name], WEIGHT_PARTS.get(config.precision, PARTS), self.dtype)
        heads = batch * config.heads
        # A part has at least a tile of keys, or nothing to do.
        self.splits = min(power_above(-(-PROGRAMS // heads)), power_above(-(-self.tables.most // TILE)))
        lists = len(self.tables.heads)
        whole = {"known": batch, "position": 1, "top_k": 1, "counts": lists, "own": lists}
        whole["seen"] = lists * self.tables.most
        self.whole = {name: torch.zeros(size, dtype=torch.int32, device=self.device) for name, size in whole.items()}
        self.state = torch.zeros(batch, dtype=torch.int64, device=self.device)
        room = {"part_top": heads, "part_total": heads, "part_result": heads * self.d_v}
        self.room = {name: torch.zeros(size * self.splits, device=self.device) for name, size in room.items()}
        self.room |= {name: torch.ones(1, device=self.device) for name in ("temperature", "top_p")}
        self.h = torch.zeros(batch, config.width, device=self.device)
        self.x = torch.zeros(PARTS, batch, config.width, dtype=self.dtype, device=self.device)
        self.logits = torch.zeros(batch, BYTES.value, device=self.device)
        self.graphs: dict[bool, Any] = {}

    @torch.inference_mode()
    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps] on the GPU. Of a stream those below `known` [batch] are what `tokens` has."""
        self.whole["known"].copy_(known)
        self.state.copy_(state)
        self.whole["position"].fill_(self.position)
        self.whole["top_k"].fill_(choice.top_k or BYTES.value)
        self.room["temperature"].fill_(choice.temperature)
        self.room["top_p"].fill_(choice.top_p or 1.0)
        with self.on_its_device():
            for _ in range(steps):
                self._replay(choice.filters)
        self.position += steps
        return self.tokens[:, self.position - steps : self.position]

    def _replay(self, filters: bool) -> None:
        if self.device.type != "cuda":
            self._step(filters)
        elif filters in self.graphs:
            self.graphs[filters].replay()
        else:  # The first one is a step already; what is compiled and allocated then is there when the second is captured.
            self._step(filters)
            self.graphs[filters] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(filters)

    def _step(self, filters: bool) -> None:
        config, tables, weights, whole, batch = self.config, self.tables, self.weights, self.whole, self.batch
        lists = {name: whole[name] for name in ("seen", "counts", "own")}
        by_entry = [{name: x.view(tables.cycle, -1)[entry] for name, x in lists.items()} for entry in range(tables.cycle)]
        parts = {name: self.room[name] for name in ("part_top", "part_total", "part_result")}
        self.list_seen(whole["position"], 1, lists)
        begin_step[(batch,)](
            self.chosen, whole["position"], weights["token_table"], weights["place_table"], weights["places"], self.h,
            W=config.width, DIMENSIONS=len(config.positions.sizes), BLOCK_W=power_above(config.width),
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
                num_warps=LOOK_WARPS,
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
            self.logits, self.tokens, whole["known"], self.state, whole["position"], self.length, self.room["temperature"],
            whole["top_k"], self.room["top_p"], self.chosen, FILTERED=filters,
        )  # fmt: skip
        whole["position"] += 1

    def _normalize(self, added: Tensor, bias: Tensor, norm: Tensor, shift: Tensor, x: Tensor, add: bool) -> None:
        """h += added + bias, if there is something to add; x = norm(h)."""
        width = self.config.width
        add_and_normalize[(self.batch,)](
            self.h, added, bias, norm, shift, x, self.batch, ADD=add, W=width, SHARES=len(added), PARTS=len(x),
            BLOCK_W=power_above(width),
        )  # fmt: skip

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight^T as shares of a sum, float32; or with a bias gelu(x weight^T + bias), in parts as x is."""
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
    """Of a product's result the streams and columns that a program has, and of its input the share; all, if `whole`."""
    rows = min(max(power_above(batch), ROWS[0]), ROWS[1])
    down = -(-batch // rows)
    for columns in COLUMNS:
        shares, tiles = 1, down * -(-size_out // columns)
        while not whole and shares * tiles < ENOUGH and shares < SHARES and size_in >= 2 * shares * SHARE:
            shares *= 2
        if shares * tiles >= ENOUGH:
            break
    return rows, columns, -(-size_in // (shares * BLOCK_IN)) * BLOCK_IN


def in_parts(x: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """Numbers of x, [layers, ...], as sums of `parts` of a smaller type: [layers, parts, ...]."""
    found = [x.to(dtype)]
    for _ in range(parts - 1):
        x = x - found[-1]
        found.append(x.to(dtype))
    return torch.stack(found, 1)


BLOCK_WEIGHTS = {
    "norm_1", "shift_1", "qkv_weight", "qkv_bias", "project_weight", "project_bias", "norm_2", "shift_2", "inner_weight",
    "inner_bias", "outer_weight", "outer_bias",
}  # fmt: skip
