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
