"""ModelConfig: the complete, validated description of a network."""

import json
from bisect import bisect
from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, Self

from longstride.common.checks import Boolean, Choice, Real, Rule, Text, Whole, check_field_names, check_fields, short_repr
from longstride.common.files import parse_object
from longstride.common.limits import check_limit
from longstride.model import recompute
from longstride.model.placement import Heads, place
from longstride.model.positions import Positions, positions
from longstride.patterns import Dilated, Pattern

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "bfloat16", "float16", "float64"]
ROUNDING = 1e-6
BYTES = 256
LARGEST_RATIO = 1024
NAMED = 12
"""How many divisors an error suggests."""
RULES: dict[str, Rule] = {
    "layers": Whole(1, "layers"),
    "width": Whole(1, "width"),
    "heads": Whole(1, "heads"),
    "context": Whole(1, "positions"),
    "pattern": Text("text"),
    "embedding": Text("text"),
    "qk_ratio": Real(0, LARGEST_RATIO),
    "ff_ratio": Real(0, LARGEST_RATIO),
    "dropout": Real(0, 1, below=True),
    "init": Choice("paper", "release", "modern"),
    "precision": Choice("float32", "bfloat16", "float16", "float64", "auto"),
    "recompute": recompute.Recomputation(),
    "chunk": Whole(1, "positions"),
    "norm": Choice("layer", "rms"),
    "qk_norm": Boolean(),
    "last_bytes": Whole(1, "last_bytes"),
}


@dataclass(frozen=True)
class ModelConfig:
    """A network, complete and checked: a field that does not fit raises ValueError.

    Without a default are layers, width, heads (which must divide width), context (the longest sequence, in bytes),
    pattern and embedding, both as text. `pattern` gives each block and head its pattern, such as
    'interleave(strided(128))' or 'distinct(merged(fixed(128, 32)))'; every pattern is causal. `embedding` says what a
    position is: 'matrix(128)', 'image(32, 32, 3)' or 'rotary'.

    Defaults: qk_ratio 1.0 and ff_ratio 4.0 (queries and keys [.., width * qk_ratio], inner layer [.., width * ff_ratio]),
    dropout 0.0, init 'release', precision 'float32' (of activations), recompute 'off', chunk 8192 (positions per chunk of
    the loss), norm 'layer', qk_norm False, last_bytes 1. docs/model.md explains each field.

    Example:
        >>> from longstride import ModelConfig
        >>> config = ModelConfig(
        ...     layers=4, width=128, heads=2, context=1024, pattern="interleave(strided(32))", embedding="matrix(32)"
        ... )
        >>> config.patterns(0), config.patterns(1)  # of the heads of a block
        ((Local(32), Local(32)), (Column(32), Column(32)))
        >>> f"{config.parameters:,}"
        '867,200'
    """

    layers: int
    """Residual blocks, N in the paper."""
    width: int
    """Size of the residual stream, d in the paper."""
    heads: int
    """Attention heads of a block; they share the width."""
    context: int
    """The longest sequence, in bytes."""
    pattern: str
    """The pattern of each block and head, such as 'interleave(strided(128))'; `model.placement` defines the notation."""
    embedding: str
    """Position embedding: 'matrix(128)' for row and column in a matrix as wide as the stride, 'image(32, 32, 3)' for row,
    column and channel of an image, or 'rotary': nothing is learned, and queries and keys are rotated by their position."""
    qk_ratio: float = 1.0
    """Total size of the queries of all heads, and of the keys, relative to the width: 0.5 is the paper's half size."""
    ff_ratio: float = 4.0
    """Size of the feed-forward network's inner layer, relative to the width: 2.0 is the paper's half size."""
    dropout: float = 0.0
    """At the end of each residual addition, and nowhere else."""
    init: Literal["paper", "release", "modern"] = "release"
    """Standard deviation of the weights: "paper" is 0.125 / sqrt(d_in), as the paper says; "release" is sqrt(0.125 / d_in),
    as in its authors' code, which learns faster (docs/log.md). "modern" is 0.5 / sqrt(d_in), with larger embeddings,
    projections into the residual stream 0 and an output layer that is not."""
    precision: Precision | Literal["auto"] = "float32"
    """Dtype of the activations. Weights are float32, and softmax, norms, logits and loss are computed in float32. "auto":
    chosen by training: bfloat16 on a device that multiplies matrices much faster in it. Elsewhere the same as float32."""
    recompute: str = "off"
    """Activation checkpointing: "on" recomputes blocks in the backward pass, "selective" all but the attention itself,
    "parts" in parts, for long contexts; "host" also keeps the blocks' inputs in host memory. A sum such as "10*off + 20*on"
    gives each block its own (`model.recompute` has all choices). "auto": chosen by training, for the memory of the GPU."""
    chunk: int = 8192
    """Positions whose logits are in memory at a time, for the loss."""
    norm: Literal["layer", "rms"] = "layer"
    """"layer" is layer normalization. "rms" divides by the root mean square, also after the embedding; norms then have no
    weights, and linear layers no biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, with a learned scale per head."""
    last_bytes: int = 1
    """Number of bytes before a position whose embeddings are summed there; 1 in the paper."""

    def __post_init__(self) -> None:
        if isinstance(self.pattern, Pattern):
            raise ValueError(f"config: pattern must be text, got {short_repr(self.pattern)}; give it as text: repr(pattern)")
        check_fields("config", self, RULES)
        if self.width % self.heads:
            near = ", ".join(map(str, _divisors(self.width, self.heads)))
            raise ValueError(f"config: heads = {self.heads} does not divide width = {self.width}; these do: {near}")
        for name, parts in (("qk_ratio", self.heads), ("ff_ratio", 1)):
            size = self.width * getattr(self, name)
            if abs(size - round(size)) > ROUNDING or round(size) < parts or round(size) % parts:
                raise ValueError(
                    f"config: {name} = {getattr(self, name)} makes {size:g} of width = {self.width}, which must be "
                    + (f"a multiple of heads = {self.heads}" if parts > 1 else "a whole number from 1 on")
                )
        try:
            place(self.pattern, self.heads)
            positions(self.embedding, self.context)
            recompute.read(self.recompute, self.layers)
        except ValueError as error:
            raise ValueError(f"config: {error}") from None
        if self.is_rotary and self.qk_width // self.heads % 2:
            raise ValueError(
                f"config: embedding = 'rotary' needs an even size of queries per head, got {self.qk_width // self.heads}; "
                "change width, heads or qk_ratio"
            )
        given = f"layers = {self.layers:,}, width = {self.width:,} and embedding = {short_repr(self.embedding)}"
        check_limit("config", f"the weights of {given}", self.parameters, "parameters")

    def resolved(self, precision: Precision = "float32") -> Self:
        """Returns the config with this precision where it is "auto"."""
        return replace(self, precision=precision) if self.precision == "auto" else self

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of the activations."""
        import torch  # The command line reads configs without it.

        return getattr(torch, self.resolved().precision)

    @property
    def qk_width(self) -> int:
        return round(self.width * self.qk_ratio)

    @property
    def ff_width(self) -> int:
        return round(self.width * self.ff_ratio)

    @property
    def parameters(self) -> int:
        """Number of learned parameters, in closed form: equals SparseTransformer.parameter_count()."""
        outside = self.table_rows * self.width + 2 * self.width * (self.norm == "layer") + BYTES * self.width
        return outside + self.layers * self.block_parameters

    @property
    def block_parameters(self) -> int:
        """Number of learned parameters of a block."""
        width, qk, ff = self.width, self.qk_width, self.ff_width
        biases = 2 * qk + width + width + ff + width + 4 * width if self.norm == "layer" else 0  # and two norms
        return self.block_matrix_parameters + (self.heads if self.qk_norm else 0) + biases

    @property
    def block_matrix_parameters(self) -> int:
        """Number of learned parameters in the matrices of a block."""
        width, qk, ff = self.width, self.qk_width, self.ff_width
        return width * (2 * qk + width) + width * width + 2 * width * ff

    @property
    def table_rows(self) -> int:
        """Rows of all embedding tables: bytes, the start vector, and positions."""
        return BYTES * self.last_bytes + 1 + sum(self.positions.sizes)

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated by their position."""
        return not self.positions.sizes

    @property
    def period(self) -> int:
        """The longest period of the patterns; about sqrt(context) if they have none."""
        leaves = [leaf for heads in self.cycle for pattern in heads for leaf in pattern.leaves]
        longest = max(leaf.step if isinstance(leaf, Dilated) else getattr(leaf, "l", 1) for leaf in leaves)
        return longest if longest > 1 else isqrt(self.context)

    @property
    def beyond_the_paper(self) -> list[str]:
        """Names of the fields that make another network than the paper's; initial values of weights do not."""
        changed = {"embedding": self.is_rotary, "norm": self.norm != "layer", "qk_norm": self.qk_norm}
        return [name for name, differs in {**changed, "last_bytes": self.last_bytes > 1}.items() if differs]

    @property
    def cycle(self) -> tuple[Heads, ...]:
        """The patterns of the first blocks, one per head. Block r has entry r modulo the length."""
        return place(self.pattern, self.heads)

    def patterns(self, block: int) -> Heads:
        """Returns the patterns of a block's heads."""
        cycle = self.cycle
        return cycle[block % len(cycle)]

    @property
    def block_counts(self) -> dict[Heads, int]:
        """How many blocks have each combination of head patterns, in order of first occurrence."""
        cycle, counts = self.cycle[: self.layers], Counter[Heads]()
        for block, heads in enumerate(cycle):
            counts[heads] += -(-(self.layers - block) // len(cycle))
        return counts

    @property
    def recomputed(self) -> tuple[str, ...]:
        """What is recomputed in each block: one of `recompute.CHOICES`."""
        return recompute.read(self.recompute, self.layers)

    @property
    def positions(self) -> Positions:
        return positions(self.embedding, self.context)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, owner: str = "config") -> "ModelConfig":
        """`owner` names the file in errors."""
        return cls.from_fields(parse_object(text, owner, finite=False), owner)

    @classmethod
    def from_fields(cls, given: Any, owner: str = "config") -> "ModelConfig":
        """Makes a config from the parsed fields of a JSON object."""
        given = check_field_names(given, owner, cls)
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{owner}: {str(error).removeprefix('config: ')}") from None


def _divisors(size: int, near: int) -> list[int]:
    """Returns up to NAMED divisors of a size, those around `near`."""
    small = [divisor for divisor in range(1, isqrt(size) + 1) if size % divisor == 0]
    divisors = sorted({*small, *(size // divisor for divisor in small)})
    first = max(0, min(bisect(divisors, near) - NAMED // 2, len(divisors) - NAMED))
    return divisors[first : first + NAMED]
