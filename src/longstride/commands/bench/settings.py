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
    """Sequences."""
    heads: int = 1
    """Attention heads."""
    d_qk: int = 64
    """Dimension of a head's queries and keys."""
    d_v: int = 64
    """Dimension of a head's values."""
    peers: Literal["all", "sdpa", "none"] = "all"
    """What to measure beside ours: SDPA dense and FlexAttention, SDPA alone, or nothing."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Auto is bfloat16 on a GPU and float32 elsewhere."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    impl: str = "auto"
    """Which implementation of ours."""
    repeats: int = 5
    """Rounds, in which all take turns; the median counts."""
    json: Path | None = None
    """Where to keep the results."""
    picture: Path | None = None
    """Where to draw time against n, a .png or .svg."""
    force: bool = False
    """Replace files that exist."""


@dataclass(frozen=True)
class SamplingBenchmark:
    """Time of a byte. Example: longstride bench sampling --preset enwik8 --batches 1 64 --positions 200 12000"""

    preset: str = "enwik8"
    """Whose numbers the network has; its weights are random. `longstride presets` has the names."""
    batches: tuple[int, ...] = (1, 64)
    """Streams that are made together."""
    positions: tuple[int, ...] = (200, 12_000)
    """Bytes that are there before the first one is made."""
    bytes: int | None = None
    """Of a stream, that are timed in each round; left out, 256 on a GPU and 32 elsewhere. Fewer where the context ends, and
    of peers that take long."""
    peers: Literal["all", "none"] = "all"
    """What to measure beside ours: transformers' generate() with a GPT-2 of the same numbers, and ours without a cache."""
    device: str = "auto"
    """Auto is the GPU if there is one."""
    repeats: int = 3
    """Rounds, in which all take turns, after one that does not count; the median counts."""
    json: Path | None = None
    """Where to keep the results."""
    picture: Path | None = None
    """Where to draw bytes per second, a .png or .svg."""
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
    """Which kernels; left out, all."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Head dimensions, as powers of two from 16 to 256; others are padded to the next one."""
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16",)
    """Of queries, keys and values."""
    repeats: int = 9
    """Rounds, in which candidates take turns; the median counts."""
    out: Path | None = None
    """Where to save the settings; left out, the file that longstride reads (longstride doctor names it)."""
    json: Path | None = None
    """Where to keep the measurements."""
    force: bool = False
    """Replace the file of --json if it exists."""
