"""Few streams on a GPU: `kernels/whole.py` with a model's weights, its cache, and room for what programs tell each other."""

from math import e, log2, sqrt
from typing import Any

import torch
from torch import Tensor

from longstride.attention.kernels.cached import list_seen, table
from longstride.model import SparseTransformer
from longstride.model.cache import Cache
from longstride.sampling.decoder import in_float32, make_cache, prefill
from longstride.sampling.kernels.whole import START, make_bytes

STREAMS = 8
"""The most that are made together: the products are of vectors, for each stream anew."""
TILES = (16, 256)
"""The least and the most keys that a program looks at together."""
LISTED = 2**26
"""Bytes for lists of what queries see: more bytes are made at a time where they see little."""
AHEAD = 128
"""The most positions whose lists are made at a time, and so bytes in a launch."""
WARPS = 8
LIST_BLOCK = 256


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
        self.weights = _Weights(self.model, getattr(torch, config.precision), self.device)
        self.tables = _Tables(self.cache, self.device)
        heads = batch * config.heads
        self.splits = max(1, _power(self.programs // heads))
        self.turns = -(-heads * self.splits // self.programs)
        least, most = TILES
        self.tile = min(most, max(least, _above(-(-self.tables.most // self.splits))))
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
            "inner": batch * config.ff_width, "logits": batch * 256,
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
    def make(
        self, steps: int, known: Tensor, state: Tensor, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:  # fmt: skip
        """The next bytes, [batch, steps] on the GPU. Of a stream those below `known` [batch] are what `tokens` has."""
        made = self.tokens[:, self.position : self.position + steps]
        while steps:
            some = min(steps, self.ahead)
            self._make(some, known, state, float(temperature), top_k, top_p)
            self.position += some
            steps -= some
        return made

    def _make(
        self, steps: int, known: Tensor, state: Tensor, temperature: float, top_k: int | None, top_p: float | None
    ) -> None:  # fmt: skip
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
            self.tokens, known, state, self.first, steps, self.length, temperature, top_k or 256, top_p or 1.0,
            **self.weights.tensors, **tables.tensors, **self.lists, **self.room, key_cache=self.cache.all_keys,
            value_cache=self.cache.all_values, chosen=self.chosen, counter=self.counter, most=tables.most,
            scale=log2(e) / sqrt(d_qk), PROGRAMS=self.programs, LAYERS=config.layers, CYCLE=tables.cycle,
            PATTERNS=tables.patterns, B=self.batch, W=config.width, F=config.ff_width, H=heads, D_QK=d_qk, D_V=d_v,
            DIMENSIONS=len(config.positions.sizes), SPLITS=self.splits, TURNS=self.turns, TILE=self.tile,
            FILTERED=top_k is not None or top_p is not None, BLOCK_W=_above(config.width), BLOCK_F=_above(config.ff_width),
            BLOCK_H=_above(heads), BLOCK_QK=_above(d_qk), BLOCK_V=_above(d_v),
            QKV_ROWS=self._rows(2 * config.qk_width + config.width), PROJECT_ROWS=self._rows(config.width),
            INNER_ROWS=self._rows(config.ff_width), OUTER_ROWS=self._rows(config.width), LOGIT_ROWS=self._rows(256),
            **options,
        )  # fmt: skip

    def _rows(self, out: int) -> int:
        """Of a matrix, for each program."""
        return _above(-(-out // self.programs))


class _Weights:
    """A model's, by the kernel's names: those of all blocks in one tensor each."""

    def __init__(self, model: SparseTransformer, dtype: torch.dtype, device: torch.device) -> None:
        stacks: dict[str, list[Tensor]] = {}
        block: Any
        for block in model.blocks:
            attention, ff = block.attention, block.ff
            for name, x in {
                "norm_1": block.norm_attention.weight, "shift_1": block.norm_attention.bias,
                "qkv_weight": attention.query_key_value.weight, "qkv_bias": attention.query_key_value.bias,
                "project_weight": attention.project.weight, "project_bias": attention.project.bias,
                "norm_2": block.norm_ff.weight, "shift_2": block.norm_ff.bias,
                "inner_weight": ff.inner.weight, "inner_bias": ff.inner.bias,
                "outer_weight": ff.outer.weight, "outer_bias": ff.outer.bias,
            }.items():  # fmt: skip
                stacks.setdefault(name, []).append(x.detach())
        self.tensors = {name: torch.stack(parts) for name, parts in stacks.items()}
        for name in ("qkv_weight", "project_weight", "inner_weight", "outer_weight"):
            self.tensors[name] = self.tensors[name].to(dtype)  # They are so rounded already.
        embedding: Any = model.embedding
        tables = [embedding.position[name].weight.detach() for name in embedding.positions.names]
        self.tensors |= {
            "norm_last": model.norm.weight.detach(), "shift_last": model.norm.bias.detach(),
            "output_weight": model.output.weight.detach(),
            "token_table": torch.cat([embedding.token.weight.detach(), embedding.start.detach()[None]]),
            "place_table": torch.cat(tables),
        }  # fmt: skip
        places, first, stride = [], 0, 1
        for size in embedding.positions.sizes:
            places.append([first, 0, size])
            first += size
        for place in reversed(places):
            place[1] = stride
            stride *= place[2]
        self.tensors["places"] = torch.tensor(places, dtype=torch.int32, device=device)


class _Tables:
    """Which patterns there are, and where blocks have their keys."""

    def __init__(self, cache: Cache, device: torch.device) -> None:
        config = cache.config
        self.cycle = min(len(config.cycle), config.layers)
        entries = cache.heads[: self.cycle]
        different = list(dict.fromkeys(head for heads in entries for head in heads))
        self.patterns = len(different)
        self.leaves = max(len(head.pattern.leaves) for head in different)
        self.most = max(head.most for head in different)
        self.table = table(different, self.leaves).to(device)
        starts = torch.tensor([0, *cache.slots[:-1]]).cumsum(0) * (cache.keys[0].shape[0] * config.heads)
        numbers = [[different.index(head) for head in heads] for heads in entries]
        self.tensors = {
            "pattern_of": torch.tensor(numbers, dtype=torch.int32, device=device),
            "key_starts": (starts * (config.qk_width // config.heads)).to(device),
            "value_starts": (starts * (config.width // config.heads)).to(device),
            "slot_counts": torch.tensor(cache.slots, dtype=torch.int32, device=device),
        }


def _programs(device: torch.device) -> int:
    """As many as a GPU can run at once, and rows can be shared among evenly. One where they are interpreted."""
    return _power(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _power(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1) if number else 0


def _above(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
