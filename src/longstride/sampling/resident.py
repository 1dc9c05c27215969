"""Up to 8 streams on a GPU: the persistent kernel of `kernels/whole.py` with a model's weights, its cache and buffers."""

from typing import Any

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import value_bytes
from longstride.sampling.kernel_streams import KernelStreams, head_blocks, next_power_of_2, previous_power_of_2
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.kernels.whole import COUNTER, make_bytes
from longstride.sampling.sampler import SamplingParams

HELD_VALUES = 2**14
"""Elements of a matrix, or of values, that fit into the registers of a program."""
FOUR_WARPS = 3 * 2**14
"""Up to this many bytes of weights, a program has four warps, and eight beyond."""
KEY_VALUE_BYTES = 3 * 2**15
"""The most bytes of keys and values that a program loads at once."""
LONGEST_CHUNK = 64
"""The most keys of a chunk."""
CHUNKS = (1, 2, 4, 7, 10, 13, 16)
"""Chunks that a program may load at once: the smallest of these with which the programs together hold all keys."""
FEW_CHUNKS = 4
"""Up to this many chunks, the worker programs compute attention themselves; beyond, extra programs (lookers) do."""
PAUSE = 300
"""Nanoseconds that a looker waits between chunks, so that the loads of workers are not delayed."""
LISTED = 2**26
"""The most bytes for lists of visible slots; fewer positions are listed where queries see many keys."""
AHEAD = 128
"""The most positions listed at a time, which is also the most bytes per launch."""


class ResidentStreams(KernelStreams):
    """`Streams` of up to 8 sequences, with one kernel launch for many bytes."""

    is_async = True

    def __init__(self, model: SparseTransformer, batch: int, length: int, programs: int | None = None) -> None:
        config = model.config
        self.workers = programs or _program_count(config, next(model.parameters()).device)
        precision = getattr(torch, config.precision)
        super().__init__(model, batch, length, precision if precision.itemsize < 4 else torch.float32, self.workers)
        heads = batch * config.heads
        self.group, self.splits, self.rows, held = _partition(config, batch, self.workers)
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
        self.buffers = {name: torch.zeros(size, device=self.device) for name, size in sizes.items()}

    @property
    def logits(self) -> Tensor:
        """[batch, 256] of the last byte."""
        return self.buffers["logits"].view(self.batch, -1)

    @torch.inference_mode()
    def extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> Tensor:
        new = self.tokens[:, self.position : self.position + steps]
        with self.device_context():
            while steps:
                count = min(steps, self.ahead)
                self._extend(count, prompt_lengths, state, params)
                self.position += count
                steps -= count
        return new

    def _extend(self, steps: int, prompt_lengths: Tensor, state: Tensor, params: SamplingParams) -> None:
        config, tables = self.config, self.tables
        self.counter.zero_()
        self.first.fill_(self.position)
        self.list_seen(self.first, steps, self.lists)
        each = -(-tables.most_between(self.position, self.position + steps - 1) // self.splits)
        shape = _attention_settings(config, self.workers, self.warps, each)
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": 1}
        if self.device.type == "cuda":
            options["launch_cooperative_grid"] = True
        make_bytes[(self.workers * (2 if shape["LOOKERS"] else 1),)](
            self.tokens, prompt_lengths, state, self.first, steps, self.length, float(params.temperature),
            params.top_k or BYTES.value, float(params.top_p or 1.0),
            **self.weights, **tables.tensors, **self.lists, **self.buffers, key_cache=self.cache.all_keys,
            value_cache=self.cache.all_values, chosen=self.chosen, counter=self.counter, most=tables.most,
            scale=self.scale, WORKERS=self.workers, G=self.group, SPLITS=self.splits, LAYERS=config.layers,
            CYCLE=tables.cycle, B=self.batch, W=config.width, F=config.ff_width, H=config.heads, D_QK=self.d_qk,
            D_V=self.d_v, DIMENSIONS=len(config.positions.sizes), FILTERED=params.has_filter,
            BLOCK_W=next_power_of_2(config.width), BLOCK_F=next_power_of_2(config.ff_width), BLOCK_QK=self.block_qk,
            BLOCK_V=self.block_v, **shape, **self.rows, **options,
        )  # fmt: skip


def _attention_settings(config: ModelConfig, workers: int, warps: int, each: int) -> dict[str, Any]:
    """Returns the kernel's attention settings for up to `each` keys per program. In a chunk, each thread loads 16 bytes of
    both halves of a key."""
    block_qk, block_v = head_blocks(config)
    longest = max(1, HELD_VALUES // block_v)
    chunk = min(LONGEST_CHUNK, longest, max(1, warps * 256 // block_qk))
    size = chunk * (4 * block_qk + value_bytes(config) * block_v)
    possible = [count for count in CHUNKS if count * size <= KEY_VALUE_BYTES] or [1]
    chunks = next((count for count in possible if count * chunk >= each), possible[-1])
    # Two programs of eight warps do not fit on one multiprocessor; the interpreter runs one program.
    lookers = chunks > FEW_CHUNKS and warps == 4 and workers > 1
    return {
        "LOOKERS": lookers, "PAUSE": PAUSE if lookers else 0, "CHUNKS": chunks, "CHUNK": chunk,
        "TILE": min(longest, 4 * chunk), "REST": each > chunks * chunk,
    }  # fmt: skip


def _partition(config: ModelConfig, batch: int, programs: int) -> tuple[int, int, dict[str, int], int]:
    """Returns programs per head, splits of a head's keys in each stream, a program's rows of each matrix, and the most
    elements of a matrix that it holds."""
    d_qk, d_v = config.qk_width // config.heads, config.width // config.heads
    group = max(1, previous_power_of_2(programs // config.heads))
    splits = max(1, previous_power_of_2(group // batch))
    shared = {
        "QKV_ROWS": (2 * d_qk + d_v, group, config.width), "PROJECT_ROWS": (config.width, splits, d_v),
        "INNER_ROWS": (config.ff_width, programs, config.width), "WIDTH_ROWS": (config.width, programs, config.ff_width),
        "LOGIT_ROWS": (BYTES.value, programs, config.width),
    }  # fmt: skip
    rows = {name: next_power_of_2(-(-out // among)) for name, (out, among, _) in shared.items()}
    return group, splits, rows, max(rows[name] * next_power_of_2(columns) for name, (_, _, columns) in shared.items())


def fits(config: ModelConfig, batch: int, device: torch.device) -> bool:
    """Whether each program can hold its rows of every matrix, and each head of each stream has a program."""
    programs = _program_count(config, device)
    return _partition(config, batch, programs)[3] <= HELD_VALUES and batch * config.heads <= programs


def _program_count(config: ModelConfig, device: torch.device) -> int:
    """Returns the programs that run at once: one per multiprocessor, each with a row of every matrix; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return previous_power_of_2(min(multiprocessors, config.width, config.ff_width, BYTES.value))
