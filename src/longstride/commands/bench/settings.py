"""The settings of the benchmarks: every flag of `longstride bench`. Imported without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class AttentionBenchmark:
    """Time and memory of attention. Example: longstride bench attention --lengths 256 1024 4096 16384 --heads 4"""

    shapes: tuple[str, ...] = ()
    """Data sets of the paper, instead of the next six: enwik8, imagenet64, cifar10, music-65536, -262144, -1048576."""
    lengths: tuple[int, ...] = (256, 1_024, 4_096, 16_384)
    """Sequence lengths. Two or more also show from which n on a pattern is faster than SDPA dense, three or more how time
    and memory grow with pairs(n)."""
    patterns: tuple[str, ...] = (
        "merged(strided(128))",
        "merged(fixed(128, 32))",
        "local(128)",
        "column(128)",
        "block(128)",
    )
    """Patterns in text form; all heads have the same one."""
    batch: int = 1
    """Sequences in a batch."""
    heads: int = 1
    """Attention heads."""
    d_qk: int = 64
    """Dimension of a head's queries and keys."""
    d_v: int = 64
    """Dimension of a head's values."""
    peers: Literal["all", "sdpa", "none"] = "sdpa"
    """What to measure beside ours: SDPA and varlen_attn; with all, FlexAttention too, which compiles for seconds to minutes
    per pattern and shape."""
    compile: tuple[str, ...] = ()
    """Shapes or lengths at which ours and SDPA dense are measured under torch.compile(fullgraph=True), too, or all. Each
    call takes some 10 seconds to compile."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Auto is bfloat16 on a GPU and float32 elsewhere."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    impl: str = "auto"
    """Implementation of `attend`."""
    repeats: int = 5
    """Rounds, in which all take turns; results are medians. A caller's times take at most 3 rounds."""
    json: Path | None = None
    """File for the results."""
    picture: Path | None = None
    """File for a plot of time against n, a .png or .svg."""
    read: Path | None = None
    """Show the results in this file, of an earlier --json, instead of measuring."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class SamplingBenchmark:
    """Time to sample a byte. Example: longstride bench sampling --preset enwik8 --batches 1 64 --positions 200 12000"""

    preset: str = "enwik8"
    """Preset that gives the network's sizes; weights are random. `longstride presets` lists the names."""
    batches: tuple[int, ...] = (1, 64)
    """Streams that are sampled together."""
    positions: tuple[int, ...] = (200, 12_000)
    """Lengths of the prompt."""
    bytes: int | None = None
    """Bytes of each stream that are timed in a round; left out, 256 on a GPU and 32 elsewhere. Fewer where the context ends,
    and for slow peers."""
    peers: Literal["all", "none"] = "all"
    """What to measure beside ours: transformers' generate() with a GPT-2 of the same sizes, and ours without a cache."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    repeats: int = 3
    """Rounds, in which all take turns, after one to warm up; results are medians."""
    json: Path | None = None
    """File for the results."""
    picture: Path | None = None
    """File for a plot of bytes per second, a .png or .svg."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class StepBenchmark:
    """Time and memory of training steps. Example: longstride bench step --cases enwik8 'enwik8 optimizer=muon'"""

    cases: tuple[str, ...] = ()
    """Presets, each with fields that differ: 'enwik8 optimizer=muon dropout=0.4 layers=12'. Left out: those of the paper's
    table 2 and imagenet64, sparse and dense, and two small ones on a machine without a GPU."""
    batch: int | None = None
    """Sequences per step, in cases that name none; left out, 8, 16 and 4 for enwik8, cifar10 and imagenet64, or the
    preset's."""
    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"
    """The optimizer, in cases that name none."""
    dropout: float = 0.0
    """Dropout, in cases that name none."""
    recompute: str = "off"
    """What blocks recompute, in cases that name nothing else."""
    peers: Literal["all", "none"] = "all"
    """What to measure beside ours: the same network in plain PyTorch, with dense SDPA and without attention."""
    eager: bool = False
    """Do not compile the blocks, neither ours nor those of the peers. Without a GPU none are compiled."""
    steps: int = 10
    """Steps of a round."""
    rounds: int = 3
    """Rounds; results are medians."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    json: Path | None = None
    """File for the results."""
    picture: Path | None = None
    """File for a plot of the times, a .png or .svg."""
    read: Path | None = None
    """Show the results in this file, of an earlier --json, instead of measuring."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class MemoryBenchmark:
    """Long contexts in a given memory. Example: longstride bench memory --gpu-memory 16GB --contexts 65536 1048576"""

    preset: str = ""
    """The network; left out, music-65536, with 152 million parameters, and audio-small on a machine without a GPU."""
    contexts: tuple[int, ...] = ()
    """Contexts in bytes; left out, those of the paper's table 4, and two short ones on a machine without a GPU."""
    gpu_memory: str = "16GB"
    """Memory that the process may take of the GPU, such as 16GB or 80GiB."""
    host_memory: str = ""
    """Memory of the host for inputs of blocks; by default what this machine has free."""
    recompute: str = "auto"
    """What blocks recompute; auto is what longstride plan chooses."""
    steps: int = 5
    """Training steps at each context. The first one warms up, and the third is captured as a CUDA graph."""
    learning_rate: float = 0.0001
    """Learning rate, without warm-up."""
    data: Path | None = None
    """File of bytes to train on; left out, a megabyte of Wikipedia, repeated."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    json: Path | None = None
    """File for the results."""
    picture: Path | None = None
    """File for a plot of memory, parameters and losses, a .png or .svg."""
    read: Path | None = None
    """Show the results in this file, of an earlier --json, instead of measuring."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class TuneBenchmark:
    """Kernel settings for this GPU. Example: longstride bench tune --widths 64 --dtypes bfloat16"""

    kernels: tuple[Literal["forward", "dq", "dkv", "lane_forward", "lane_backward"], ...] = (
        "forward",
        "dq",
        "dkv",
        "lane_forward",
        "lane_backward",
    )
    """Kernels to tune; left out, all."""
    widths: tuple[Literal[16, 32, 64, 128, 256], ...] = (32, 64, 128)
    """Head dimensions; others are padded to the next one."""
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",)
    """Dtypes of queries, keys and values."""
    repeats: int = 9
    """Rounds, in which candidates take turns; results are medians."""


Benchmark = AttentionBenchmark | SamplingBenchmark | StepBenchmark | MemoryBenchmark
"""Settings of a benchmark that writes results."""
