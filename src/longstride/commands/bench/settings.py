"""The settings of the benchmarks: every flag of `longstride bench`. Imported without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class AttentionBenchmark:
    """Time and memory of attention. Example: longstride bench attention --lengths 4096 16384 --heads 4"""

    shapes: tuple[str, ...] = ()
    """Data sets of the paper, instead of the next six: enwik8, imagenet64, cifar10, music-65536, -262144, -1048576."""
    lengths: tuple[int, ...] = (16_384,)
    """Sequence lengths; three or more also give how time and memory grow with pairs(n)."""
    patterns: tuple[str, ...] = (
        "merged(strided(128))",
        "merged(fixed(128, 32))",
        "local(128)",
        "column(128)",
        "block(128)",
    )
    """Patterns as text, one for all heads."""
    batch: int = 1
    """Sequences in a batch."""
    heads: int = 1
    """Attention heads."""
    d_qk: int = 64
    """Dimension of a head's queries and keys."""
    d_v: int = 64
    """Dimension of a head's values."""
    peers: Literal["all", "sdpa", "none"] = "all"
    """What else to measure: SDPA dense and FlexAttention, SDPA alone, or nothing."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Auto is bfloat16 on a GPU and float32 elsewhere."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    impl: str = "auto"
    """Our implementation: auto, triton, blocked or reference."""
    repeats: int = 5
    """Rounds of measurement; the median is reported."""
    json: Path | None = None
    """The file for the results."""
    picture: Path | None = None
    """The file for a picture of time against n, PNG or SVG by its ending."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class SamplingBenchmark:
    """Time of a byte. Example: longstride bench sampling --preset enwik8 --batches 1 64 --positions 200 12000"""

    preset: str = "enwik8"
    """The preset of the network, with random weights. `longstride presets` lists the names."""
    batches: tuple[int, ...] = (1, 64)
    """Numbers of streams sampled together."""
    positions: tuple[int, ...] = (200, 12_000)
    """Positions to time: bytes of the prompt."""
    bytes: int | None = None
    """Bytes of a stream that are timed in each round; by default 256 on a GPU and 32 elsewhere. Fewer near the end of the
    context, and for slow peers."""
    peers: Literal["all", "none"] = "all"
    """What else to measure: transformers' generate() with a GPT-2 of the same sizes, and our network without a cache."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    repeats: int = 3
    """Rounds of measurement after a warm-up round; the median is reported."""
    json: Path | None = None
    """The file for the results."""
    picture: Path | None = None
    """The file for a picture of bytes per second, PNG or SVG by its ending."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class TuneBenchmark:
    """Settings for this GPU. Example: longstride bench tune --widths 64 --dtypes bfloat16"""

    kernels: tuple[Literal["forward", "dq", "dkv", "lane_forward", "lane_backward"], ...] = (
        "forward",
        "dq",
        "dkv",
        "lane_forward",
        "lane_backward",
    )
    """Kernels to tune."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Head dimensions, as powers of two from 16 to 256; others are padded to the next one."""
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",)
    """Dtypes of queries, keys and values."""
    repeats: int = 9
    """Rounds of measurement; the median counts."""
    out: Path | None = None
    """The file for the settings; by default the one that longstride reads, which longstride doctor names."""
    json: Path | None = None
    """The file for the measurements."""
    force: bool = False
    """Replace the file of --json if it exists."""
