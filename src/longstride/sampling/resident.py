"""Few streams on a GPU: `kernels/whole.py` with a model's weights, its cache, and room for what programs tell each other."""

from contextlib import nullcontext
from math import e, log2, sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.cached import list_seen
from longstride.model import ModelConfig, SparseTransformer
from longstride.sampling.choose import Choice
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.common import BYTES, START
from longstride.sampling.kernels.whole import make_bytes
from longstride.sampling.tables import LIST_BLOCK, Tables, Weights, power_above, power_below

PROGRAM_WEIGHTS = 2**14
"""Of a matrix, what a program can have in its registers."""
TILE, WIDE_TILE = 32, 128
"""Keys that a program looks at together: first, and where there are more."""
LISTED = 2**26
"""Bytes for lists of what queries see: more bytes are made at a time where they see little."""
AHEAD = 128
"""The most positions whose lists are made at a time, and so bytes in a launch."""
WARPS = 8


class Resident:
    """B streams from the beginning on."""

    def __init__(self, model: SparseTransformer, batch: int, length: int, programs: int | None = None) -> None:
        config = model.config
        self.config, self.batch, self.length = config, batch, length
        self.device = next(model.parameters()).device
        self.programs = programs or _programs(self.device)
        self.model = in_float32(model)
        self.cache = make_cache(model, batch, length)
        self.position = 0
        precision = getattr(torch, config.precision)
        self.weights = Weights(self.model, precision if precision.itemsize < 4 else torch.float32, self.device)
        self.tables = Tables(self.cache, self.device)
        heads = batch * config.heads
        self.splits = max(1, power_below(self.programs // heads))
        self.turns = -(-heads * self.splits // self.programs)
        self.ahead = max(1, min(AHEAD, LISTED // (4 * self.tables.patterns * self.tables.most)))
        lists = {"seen": self.tables.most, "counts": 1, "own": 1}
        self.lists = {
            name: torch.zeros(self.ahead * self.tables.patterns * size, dtype=torch.int32, device=self.device)
            for name, size in lists.items()
        }
        self.first = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.tokens = torch.zeros(batch, length, dtype=torch.uint8, device=self.device)
        self.chosen = torch.full((self.programs, batch), START.value, dtype=torch.int32, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        parts = batch * config.heads * self.splits
        sizes = {
            "h": batch * config.width, "q": batch * config.qk_width, "part_top": parts, "part_total": parts,
            "part_result": parts * (config.width // config.heads), "middle": batch * config.width,
            "inner": batch * config.ff_width, "logits": batch * BYTES.value,
        }  # fmt: skip
        self.room = {name: torch.zeros(size, device=self.device) for name, size in sizes.items()}

    def prefill(self, tokens: Tensor) -> None:
        """Takes in the first n bytes."""
        n = tokens.shape[1]
        if n:
            prefill(self.model, self.cache, tokens)
            self.tokens[:, :n] = tokens
            self.chosen[:] = tokens[:, -1].int()
        self.position = n

    @torch.inference_mode()
    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps] on the GPU. Of a stream those below `known` [batch] are what `tokens` has."""
        made = self.tokens[:, self.position : self.position + steps]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            while steps:
                some = min(steps, self.ahead)
                self._make(some, known, state, choice)
                self.position += some
                steps -= some
        return made

    def _make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> None:
        config, tables = self.config, self.tables
        heads, d_qk, d_v = config.heads, config.qk_width // config.heads, config.width // config.heads
        self.counter.zero_()
        self.first.fill_(self.position)
        list_seen[(steps * tables.patterns, -(-tables.most // LIST_BLOCK))](
            tables.table, self.first, **self.lists, most=tables.most, PATTERNS=tables.patterns, LEAVES=tables.leaves,
            BLOCK_SIZE=LIST_BLOCK,
        )  # fmt: skip
        options: dict[str, Any] = {"num_warps": WARPS, "num_stages": 1}
        if self.device.type == "cuda":
            options["launch_cooperative_grid"] = True
        make_bytes[(self.programs,)](
            self.tokens, known, state, self.first, steps, self.length, float(choice.temperature),
            choice.top_k or BYTES.value, float(choice.top_p or 1.0),
            **self.weights.tensors, **tables.tensors, **self.lists, **self.room, key_cache=self.cache.all_keys,
            value_cache=self.cache.all_values, chosen=self.chosen, counter=self.counter, most=tables.most,
            scale=log2(e) / sqrt(d_qk), PROGRAMS=self.programs, LAYERS=config.layers, CYCLE=tables.cycle,
            PATTERNS=tables.patterns, B=self.batch, W=config.width, F=config.ff_width, H=heads, D_QK=d_qk, D_V=d_v,
            DIMENSIONS=len(config.positions.sizes), SPLITS=self.splits, TURNS=self.turns, TILE=TILE, WIDE_TILE=WIDE_TILE,
            FILTERED=choice.filters, BLOCK_W=power_above(config.width), BLOCK_F=power_above(config.ff_width),
            BLOCK_H=power_above(heads), BLOCK_QK=power_above(d_qk), BLOCK_V=power_above(d_v),
            QKV_ROWS=self._rows(2 * config.qk_width + config.width), PROJECT_ROWS=self._rows(config.width),
            INNER_ROWS=self._rows(config.ff_width), OUTER_ROWS=self._rows(config.width), LOGIT_ROWS=self._rows(BYTES.value),
            **options,
        )  # fmt: skip

    def _rows(self, out: int) -> int:
        """Of a matrix, for each program."""
        return power_above(-(-out // self.programs))


def fits(config: ModelConfig, batch: int, device: torch.device) -> bool:
    """Whether each program can hold its rows of every matrix, and each head of each stream has a program."""
    programs = _programs(device)
    shapes = [
        (2 * config.qk_width + config.width, config.width), (config.ff_width, config.width), (config.width, config.ff_width)
    ]  # fmt: skip
    held = [power_above(-(-rows // programs)) * power_above(columns) for rows, columns in shapes]
    return max(held) <= PROGRAM_WEIGHTS and batch * config.heads <= programs


def _programs(device: torch.device) -> int:
    """As many as a GPU can run at once, and rows can be shared among evenly. One where they are interpreted."""
    return power_below(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
