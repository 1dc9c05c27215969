"""Many streams on a GPU: a step is products and the kernels between them, launched as one CUDA graph.

The same interface as `Resident` has. Streams are computed together, so a step reads the weights once for all of them.
"""

from contextlib import nullcontext
from math import e, log2, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longstride.attention.kernels.cached import list_seen
from longstride.model import SparseTransformer
from longstride.sampling.choose import Choice
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.batched import (
    activate,
    add_and_normalize,
    begin_step,
    end_step,
    join_parts,
    keep_and_look,
)
from longstride.sampling.kernels.common import BYTES, START
from longstride.sampling.tables import LIST_BLOCK, Tables, Weights, power_above

PARTS = 3
TILE = 32
"""Keys that a program looks at together."""
STAGES = 3
"""Of them, whose keys and values are on their way at once."""
PROGRAMS = 512
"""Into as many the heads of all streams are split, if there are fewer."""
ACTIVATE_BLOCK = 1024


class Batched:
    """Streams from the beginning on, all at the same position."""

    returns_early = False  # A step may take as long to launch as to run.

    def __init__(self, model: SparseTransformer, batch: int, length: int) -> None:
        config = model.config
        self.config, self.batch, self.length = config, batch, length
        self.device = next(model.parameters()).device
        self.model = in_float32(model)
        self.cache = make_cache(model, batch, length)
        precision = getattr(torch, config.precision)
        # The parts of a float16 number would be too small for it.
        self.parts = PARTS if precision == torch.bfloat16 else 1
        self.dtype = precision if self.parts > 1 else torch.float32
        self.weights = Weights(self.model, self.dtype, self.device).tensors
        self.tables = Tables(self.cache, self.device)
        self.position = 0
        heads = batch * config.heads
        # A part has at least a tile of keys, or nothing to do.
        self.splits = min(power_above(-(-PROGRAMS // heads)), power_above(-(-self.tables.most // TILE)))
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.device)
        lists = len(self.tables.heads)
        whole = {"chosen": batch, "known": batch, "position": 1, "top_k": 1, "counts": lists, "own": lists}
        whole["seen"] = lists * self.tables.most
        self.whole = {name: torch.zeros(size, dtype=torch.int32, device=self.device) for name, size in whole.items()}
        self.whole["chosen"].fill_(START.value)
        self.state = torch.zeros(batch, dtype=torch.int64, device=self.device)
        width = config.width // config.heads
        room = {"part_top": heads, "part_total": heads, "part_result": heads * width}
        self.room = {name: torch.zeros(size * self.splits, device=self.device) for name, size in room.items()}
        self.room |= {name: torch.ones(1, device=self.device) for name in ("temperature", "top_p")}
        self.h = torch.zeros(batch, config.width, device=self.device)
        self.logits = torch.zeros(batch, BYTES.value, device=self.device)
        self.graphs: dict[bool, Any] = {}

    def prefill(self, tokens: Tensor) -> None:
        """Takes in the first n bytes."""
        n = tokens.shape[1]
        if n:
            prefill(self.model, self.cache, tokens)
            self.tokens[:, :n] = tokens
            self.whole["chosen"].copy_(tokens[:, -1])
        self.position = n

    @torch.inference_mode()
    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps] on the GPU. Of a stream those below `known` [batch] are what `tokens` has."""
        self.whole["known"].copy_(known)
        self.state.copy_(state)
        self.whole["position"].fill_(self.position)
        self.whole["top_k"].fill_(choice.top_k or BYTES.value)
        self.room["temperature"].fill_(choice.temperature)
        self.room["top_p"].fill_(choice.top_p or 1.0)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
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
        width, heads = config.width, config.heads
        d_qk, d_v = config.qk_width // heads, width // heads
        block_w, block_v = power_above(width), power_above(d_v)
        lists = {name: whole[name] for name in ("seen", "counts", "own")}
        by_entry = [{name: x.view(tables.cycle, -1)[entry] for name, x in lists.items()} for entry in range(tables.cycle)]
        parts = {name: self.room[name] for name in ("part_top", "part_total", "part_result")}
        list_seen[(len(tables.heads), -(-tables.most // LIST_BLOCK))](
            tables.table, whole["position"], **lists, most=tables.most, HEADS=len(tables.heads), LEAVES=tables.leaves,
            BLOCK_SIZE=LIST_BLOCK,
        )  # fmt: skip
        begin_step[(batch,)](
            whole["chosen"], whole["position"], weights["token_table"], weights["place_table"], weights["places"], self.h,
            W=width, DIMENSIONS=len(config.positions.sizes), BLOCK_W=block_w,
        )  # fmt: skip

        def normalize(added: Tensor, bias: Tensor, norm: Tensor, shift: Tensor, add: bool, out: int, dtype: Any) -> Tensor:
            x = torch.empty(out * batch, width, dtype=dtype, device=self.device)
            add_and_normalize[(batch,)](
                self.h, added, bias, norm, shift, x, batch, ADD=add, W=width, PARTS_IN=self.parts, PARTS_OUT=out,
                BLOCK_W=block_w,
            )  # fmt: skip
            return x

        added, bias = self.h, weights["outer_bias"][0]
        for number in range(config.layers):
            own = {name: x[number] for name, x in weights.items() if name in BLOCK_WEIGHTS}
            x = normalize(added, bias, own["norm_1"], own["shift_1"], number > 0, self.parts, self.dtype)
            qkv = self._product(x, own["qkv_weight"])
            keep_and_look[(batch * heads * self.splits,)](
                qkv, own["qkv_bias"], self.cache.keys[number], self.cache.values[number], self.cache.slots[number],
                **by_entry[number % tables.cycle], most=tables.most, **parts, batch=batch, scale=log2(e) / sqrt(d_qk),
                H=heads, D_QK=d_qk, D_V=d_v, PARTS=self.parts, REST=tables.most > self.splits * TILE, SPLITS=self.splits,
                TILE=TILE, STAGES=STAGES, BLOCK_QK=max(2, power_above(d_qk)), BLOCK_V=block_v,
            )  # fmt: skip
            x = torch.empty(self.parts * batch, width, dtype=self.dtype, device=self.device)
            join_parts[(batch * heads,)](
                **parts, x=x, batch=batch, H=heads, D_V=d_v, SPLITS=self.splits, PARTS=self.parts, BLOCK_V=block_v
            )  # fmt: skip
            added = self._product(x, own["project_weight"])
            x = normalize(added, own["project_bias"], own["norm_2"], own["shift_2"], True, self.parts, self.dtype)
            inner = self._product(x, own["inner_weight"])
            x = torch.empty(self.parts * batch, config.ff_width, dtype=self.dtype, device=self.device)
            activate[(batch, -(-config.ff_width // ACTIVATE_BLOCK))](
                inner, own["inner_bias"], x, batch, F=config.ff_width, PARTS=self.parts, BLOCK_F=ACTIVATE_BLOCK
            )  # fmt: skip
            added, bias = self._product(x, own["outer_weight"]), own["outer_bias"]
        x = normalize(added, bias, weights["norm_last"], weights["shift_last"], True, 1, torch.float32)
        torch.mm(x, weights["output_weight"].T, out=self.logits)
        end_step[(batch,)](
            self.logits, self.tokens, whole["known"], self.state, whole["position"], self.length, self.room["temperature"],
            whole["top_k"], self.room["top_p"], whole["chosen"], FILTERED=filters,
        )  # fmt: skip
        whole["position"] += 1

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """float32, whatever the two are."""
        if self.parts == 1:
            return F.linear(x, weight)
        if self.device.type == "cuda":
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x.float(), weight.float())


BLOCK_WEIGHTS = {
    "norm_1", "shift_1", "qkv_weight", "qkv_bias", "project_weight", "project_bias", "norm_2", "shift_2", "inner_weight",
    "inner_bias", "outer_weight", "outer_bias",
}  # fmt: skip
