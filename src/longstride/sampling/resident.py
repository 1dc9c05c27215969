"""Up to 8 streams on a GPU: the persistent kernel of `kernels/whole.py` with a model's weights, its cache and buffers."""

from typing import Any

import torch
from torch import Tensor

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import value_bytes
from longstride.sampling.kernel_streams import KernelStreams, head_blocks, next_power_of_2, previous_power_of_2
from longstride.sampling.kernels.arguments import Cache, Partition, Streams, Workspace
from longstride.sampling.kernels.cached_attention import KeySplit, SoftmaxState, constants
from longstride.sampling.kernels.common import BYTES
from longstride.sampling.kernels.whole import COUNTER_STRIDE, make_bytes
from longstride.sampling.params import SamplingParams

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
"""Up to this many chunks, the workers compute attention themselves; beyond, attention programs do."""
PAUSE = 300
"""Nanoseconds that an attention program waits between chunks, so that the loads of workers are not delayed."""
LISTED = 2**26
"""The most bytes for lists of visible slots; fewer positions are listed where queries see many keys."""
AHEAD = 128
"""The most positions listed at a time, which is also the most bytes per launch."""


class ResidentStreams(KernelStreams):
    """`Streams` of up to 8 sequences, with one kernel launch for many bytes."""

    is_async = True

    def __init__(
        self, model: SparseTransformer, batch: int, length: int, programs: int | None = None,
        shared: KernelStreams | None = None,
    ) -> None:  # fmt: skip
        config = model.config
        self.workers = programs or _program_count(config, next(model.parameters()).device)
        precision = config.dtype
        dtype = precision if precision.itemsize < 4 else torch.float32
        # Exact: `in_float32` has rounded the weights to this precision.
        super().__init__(model, batch, length, lambda weight: weight.to(dtype), self.workers, shared)
        partition, self.splits, held = _partition(config, batch, self.workers)
        self.partition = constants(partition)
        self.warps = 4 if held * value_bytes(config) <= FOUR_WARPS else 8
        self.ahead = max(1, min(AHEAD, LISTED // (4 * len(self.tables.heads) * self.tables.most)))
        self.visible = self.visible_slots(self.ahead)
        self.space = self._workspace()

    def _workspace(self) -> Workspace:
        config, batch = self.config, self.batch

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=self.device)

        parts = (batch, config.heads, self.splits)
        return Workspace(
            embedding=zeros(self.workers, batch, config.width),
            h=zeros(batch, config.width),
            qkv=zeros(batch, 2 * config.qk_width + config.width),
            parts=SoftmaxState(zeros(*parts), zeros(*parts), zeros(*parts, self.d_v)),
            projected=zeros(batch, config.heads, config.width),
            inner=zeros(batch, config.ff_width),
            logits=zeros(batch, BYTES.value),
            counters=torch.zeros(1 + config.heads, COUNTER_STRIDE.value, dtype=torch.int32, device=self.device),
        )

    @property
    def logits(self) -> Tensor:
        """[batch, 256] of the last byte."""
        return self.space.logits

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
        tables, cache = self.tables, self.cache
        self.space.counters.zero_()
        self.visible.position.fill_(self.position)
        self.list_seen(self.visible, steps)
        each = -(-tables.most_between(self.position, self.position + steps - 1) // self.splits)
        split = _key_split(self.config, self.workers, self.warps, self.splits, each)
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": 1}
        if self.device.type == "cuda":
            options["launch_cooperative_grid"] = True
        make_bytes[(self.workers * (2 if split.has_attention_programs else 1),)](
            self.weights, Cache(cache.all_keys, cache.all_values, tables.starts, tables.slots), self.visible,
            Streams(self.tokens, prompt_lengths, state, self.last_bytes), self.space, steps, self.length,
            float(params.temperature), params.top_k or BYTES.value, float(params.top_p or 1.0), NETWORK=self.network,
            HEAD=self.head, SPLIT=constants(split), PARTITION=self.partition, FILTERED=params.has_filter, **options,
        )  # fmt: skip


def _key_split(config: ModelConfig, workers: int, warps: int, splits: int, each: int) -> KeySplit:
    """Returns how `splits` programs share a head's keys, up to `each` per program. In a chunk, each thread loads 16 bytes of
    both halves of a key."""
    block_qk, block_v = head_blocks(config)
    longest = max(1, HELD_VALUES // block_v)
    chunk = min(LONGEST_CHUNK, longest, max(1, warps * 256 // block_qk))
    size = chunk * (4 * block_qk + value_bytes(config) * block_v)
    possible = [count for count in CHUNKS if count * size <= KEY_VALUE_BYTES] or [1]
    chunks = next((count for count in possible if count * chunk >= each), possible[-1])
    # Two programs of eight warps do not fit on one multiprocessor; the interpreter runs one program.
    attention_programs = chunks > FEW_CHUNKS and warps == 4 and workers > 1
    return KeySplit(
        splits, chunks, chunk, tile=min(longest, 4 * chunk), has_remaining=each > chunks * chunk,
        pause=PAUSE if attention_programs else 0, has_attention_programs=attention_programs,
    )  # fmt: skip


def _partition(config: ModelConfig, batch: int, workers: int) -> tuple[Partition, int, int]:
    """Returns how workers share the work, the splits of a head's keys in each stream, and the most elements of a matrix that
    a worker holds."""
    d_qk, d_v = config.qk_width // config.heads, config.width // config.heads
    group = max(1, previous_power_of_2(workers // config.heads))
    splits = max(1, previous_power_of_2(group // batch))
    matrices = {  # Rows, the workers that share them, columns.
        "qkv_rows": (2 * d_qk + d_v, group, config.width), "project_rows": (config.width, splits, d_v),
        "inner_rows": (config.ff_width, workers, config.width), "outer_rows": (config.width, workers, config.ff_width),
        "logit_rows": (BYTES.value, workers, config.width),
    }  # fmt: skip
    rows = {name: next_power_of_2(-(-out // among)) for name, (out, among, _) in matrices.items()}
    groups = workers // group
    partition = Partition(
        batch, workers, group, groups, head_turns=-(-config.heads // groups), part_turns=-(-batch * splits // group), **rows
    )
    return partition, splits, max(rows[name] * next_power_of_2(columns) for name, (_, _, columns) in matrices.items())


def fits(config: ModelConfig, batch: int, device: torch.device) -> bool:
    """Whether each program can hold its rows of every matrix, and each head of each stream has a program."""
    programs = _program_count(config, device)
    return _partition(config, batch, programs)[2] <= HELD_VALUES and batch * config.heads <= programs


def _program_count(config: ModelConfig, device: torch.device) -> int:
    """Returns the programs that run at once: one per multiprocessor, each with a row of every matrix; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return previous_power_of_2(min(multiprocessors, config.width, config.ff_width, BYTES.value))
