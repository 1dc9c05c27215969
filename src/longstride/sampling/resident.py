"""Few streams on a GPU: `kernels/whole.py` with a model's weights, its cache, and room for what programs tell each other."""

from typing import Any

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import value_bytes
from longstride.sampling.choose import Choice
from longstride.sampling.kernel_streams import KernelStreams
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.kernels.whole import COUNTER, make_bytes
from longstride.sampling.tables import head_blocks, power_above, power_below

HELD = 2**14
"""Numbers of a matrix, or of values, that a program can have in its registers."""
FOUR_WARPS = 3 * 2**14
"""Bytes of them for which four warps are enough: more would only wait for each other. Beyond that there are eight."""
LOOKED_AT = 3 * 2**15
"""Bytes of keys and values that a program can have."""
LONGEST_CHUNK = 64
"""Keys that are loaded together, at most."""
CHUNKS = (1, 2, 4, 7, 10, 13, 16)
"""How many chunks a program may have at once: as few as let all programs together have all keys, if one of these will do."""
FEW_CHUNKS = 4
"""Up to so many, workers look at keys, too; for more there are lookers."""
PAUSE = 300
"""Nanoseconds between the chunks that a looker loads: workers wait for loads of their own meanwhile."""
LISTED = 2**26
"""Bytes for lists of what queries see: more bytes are made at a time where they see little."""
AHEAD = 128
"""The most positions whose lists are made at a time, and so bytes in a launch."""


class Resident(KernelStreams):
    """Few of them."""

    returns_early = True

    def __init__(self, model: SparseTransformer, batch: int, length: int, programs: int | None = None) -> None:
        config = model.config
        self.workers = programs or _programs(config, next(model.parameters()).device)
        precision = getattr(torch, config.precision)
        super().__init__(model, batch, length, precision if precision.itemsize < 4 else torch.float32, self.workers)
        heads = batch * config.heads
        self.group, self.splits, self.rows, held = _shares(config, batch, self.workers)
        self.warps = 4 if held * value_bytes(config) <= FOUR_WARPS else 8
        self.ahead = max(1, min(AHEAD, LISTED // (4 * len(self.tables.heads) * self.tables.most)))
        lists = {"seen": self.tables.most, "counts": 1, "own": 1}
        self.lists = {
            name: torch.zeros(self.ahead * len(self.tables.heads) * size, dtype=torch.int32, device=self.device)
            for name, size in lists.items()
        }
        self.first = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.counter = torch.zeros((1 + config.heads) * COUNTER.value, dtype=torch.int32, device=self.device)
        parts = heads * self.splits
        sizes = {
            "h": config.width, "first_h": self.workers * config.width, "qkv": 2 * config.qk_width + config.width,
            "projected": config.heads * config.width, "inner": config.ff_width, "logits": BYTES.value,
        }  # fmt: skip
        sizes = {name: batch * size for name, size in sizes.items()}
        sizes |= {"part_top": parts, "part_total": parts, "part_result": parts * self.d_v}
        self.room = {name: torch.zeros(size, device=self.device) for name, size in sizes.items()}

    @property
    def logits(self) -> Tensor:
        """[batch, 256] of the last byte."""
        return self.room["logits"].view(self.batch, -1)

    @torch.inference_mode()
    def make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> Tensor:
        """The next bytes, [batch, steps] on the GPU. Of a stream those below `known` [batch] are what `tokens` has."""
        made = self.tokens[:, self.position : self.position + steps]
        with self.on_its_device():
            while steps:
                some = min(steps, self.ahead)
                self._make(some, known, state, choice)
                self.position += some
                steps -= some
        return made

    def _make(self, steps: int, known: Tensor, state: Tensor, choice: Choice) -> None:
        config, tables = self.config, self.tables
        self.counter.zero_()
        self.first.fill_(self.position)
        self.list_seen(self.first, steps, self.lists)
        each = -(-tables.most_between(self.position, self.position + steps - 1) // self.splits)
        shape = _look(config, self.workers, self.warps, each)
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": 1}
        if self.device.type == "cuda":
            options["launch_cooperative_grid"] = True
        make_bytes[(self.workers * (2 if shape["LOOKERS"] else 1),)](
            self.tokens, known, state, self.first, steps, self.length, float(choice.temperature),
            choice.top_k or BYTES.value, float(choice.top_p or 1.0),
            **self.weights, **tables.tensors, **self.lists, **self.room, key_cache=self.cache.all_keys,
            value_cache=self.cache.all_values, chosen=self.chosen, counter=self.counter, most=tables.most,
            scale=self.scale, WORKERS=self.workers, G=self.group, SPLITS=self.splits, LAYERS=config.layers,
            CYCLE=tables.cycle, B=self.batch, W=config.width, F=config.ff_width, H=config.heads, D_QK=self.d_qk,
            D_V=self.d_v, DIMENSIONS=len(config.positions.sizes), FILTERED=choice.filters,
            BLOCK_W=power_above(config.width), BLOCK_F=power_above(config.ff_width), BLOCK_QK=self.block_qk,
            BLOCK_V=self.block_v, **shape, **self.rows, **options,
        )  # fmt: skip


def _look(config: ModelConfig, workers: int, warps: int, each: int) -> dict[str, Any]:
    """How programs look at up to so many keys each: a chunk is 16 bytes of both halves of a key for every thread."""
    block_qk, block_v = head_blocks(config)
    longest = max(1, HELD // block_v)
    chunk = min(LONGEST_CHUNK, longest, max(1, warps * 256 // block_qk))
    size = chunk * (4 * block_qk + value_bytes(config) * block_v)
    possible = [count for count in CHUNKS if count * size <= LOOKED_AT] or [1]
    chunks = next((count for count in possible if count * chunk >= each), possible[-1])
    # Two programs of eight warps have no room beside each other; interpreted, there is one.
    lookers = chunks > FEW_CHUNKS and warps == 4 and workers > 1
    return {
        "LOOKERS": lookers, "PAUSE": PAUSE if lookers else 0, "CHUNKS": chunks, "CHUNK": chunk,
        "TILE": min(longest, 4 * chunk), "REST": each > chunks * chunk,
    }  # fmt: skip


def _shares(config: ModelConfig, batch: int, programs: int) -> tuple[int, int, dict[str, int], int]:
    """Programs for each head, parts of a head's keys in each stream, a program's rows of each matrix, and the most numbers
    it has of one."""
    d_qk, d_v = config.qk_width // config.heads, config.width // config.heads
    group = max(1, power_below(programs // config.heads))
    splits = max(1, power_below(group // batch))
    shared = {
        "QKV_ROWS": (2 * d_qk + d_v, group, config.width), "PROJECT_ROWS": (config.width, splits, d_v),
        "INNER_ROWS": (config.ff_width, programs, config.width), "WIDTH_ROWS": (config.width, programs, config.ff_width),
        "LOGIT_ROWS": (BYTES.value, programs, config.width),
    }  # fmt: skip
    rows = {name: power_above(-(-out // among)) for name, (out, among, _) in shared.items()}
    return group, splits, rows, max(rows[name] * power_above(columns) for name, (_, _, columns) in shared.items())


def fits(config: ModelConfig, batch: int, device: torch.device) -> bool:
    """Whether each program can hold its rows of every matrix, and each head of each stream has a program."""
    programs = _programs(config, device)
    return _shares(config, batch, programs)[3] <= HELD and batch * config.heads <= programs


def _programs(config: ModelConfig, device: torch.device) -> int:
    """As many as a GPU can run at once, if each has a row of every matrix. One where they are interpreted."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return power_below(min(multiprocessors, config.width, config.ff_width, BYTES.value))
