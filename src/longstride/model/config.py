"""ModelConfig: a network, complete and checked."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from longstride.checks import read_fields, whole_number
from longstride.model.placement import Heads, place
from longstride.model.positions import Positions, positions

ROUNDING = 1e-6
CHOICES = {
    "init": ("paper", "release"),
    "precision": ("float32", "bfloat16", "float16", "float64"),
    "recompute": ("off", "on", "selective"),
}


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    """Residual blocks, N in the paper."""
    width: int
    """Numbers that a position has throughout the network, d in the paper."""
    heads: int
    context: int
    """The longest sequence, in bytes."""
    pattern: str
    """Which pattern each block and head has, such as 'interleave(strided(128))'; `model.placement` has the notation."""
    embedding: str
    """What a position is: 'matrix(128)', its row and column in a matrix as wide as the stride, or 'image(32, 32, 3)', row,
    column and channel of an image."""
    qk_ratio: float = 1.0
    """The size of all queries together, and of all keys, as a part of the width: 0.5 is the paper's half size."""
    ff_ratio: float = 4.0
    """The size of the feed-forward network's inner layer, as a multiple of the width: 2.0 is the paper's half size."""
    dropout: float = 0.0
    """At the end of each residual addition, and nowhere else."""
    init: Literal["paper", "release"] = "release"
    """Standard deviation of the weights: 0.125 / sqrt(d_in), as the paper's words read, or sqrt(0.125 / d_in), which its
    authors' release has and which learns faster (docs/log.md)."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """What activations are. Weights are float32, and so is the arithmetic of softmax, norms, logits and loss."""
    recompute: Literal["off", "on", "selective"] = "off"
    """Whether blocks are computed again in the backward pass instead of kept; selective: all but the attention itself."""
    chunk: int = 8192
    """Positions whose logits are in memory at a time while the loss is computed."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "chunk"):
            object.__setattr__(self, name, whole_number("config", name, getattr(self, name), 1))
        for name in ("qk_ratio", "ff_ratio", "dropout"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ValueError(f"config: {name} must be a number, got {getattr(self, name)!r}")
        for name in ("pattern", "embedding"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"config: {name} must be text, got {getattr(self, name)!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"config: {name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.width % self.heads:
            divisors = ", ".join(str(count) for count in range(1, self.width + 1) if self.width % count == 0)
            raise ValueError(f"config: heads = {self.heads} does not divide width = {self.width}; these do: {divisors}")
        for name, parts in (("qk_ratio", self.heads), ("ff_ratio", 1)):
            size = self.width * getattr(self, name)
            if abs(size - round(size)) > ROUNDING or round(size) < parts or round(size) % parts:
                raise ValueError(
                    f"config: {name} = {getattr(self, name)} makes {size:g} of width = {self.width}, which must be "
                    + (f"a multiple of heads = {self.heads}" if parts > 1 else "a whole number from 1 on")
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"config: dropout must be at least 0 and less than 1, got {self.dropout}")
        try:
            place(self.pattern, self.heads)
            positions(self.embedding, self.context)
        except ValueError as error:
            raise ValueError(f"config: {error}") from None

    @property
    def qk_width(self) -> int:
        return round(self.width * self.qk_ratio)

    @property
    def ff_width(self) -> int:
        return round(self.width * self.ff_ratio)

    @property
    def cycle(self) -> tuple[Heads, ...]:
        """The patterns of the first blocks, one for each head; after the last of these they begin anew."""
        return place(self.pattern, self.heads)

    def patterns(self, block: int) -> Heads:
        """Block r has A(r mod p)."""
        return self.cycle[block % len(self.cycle)]

    @property
    def positions(self) -> Positions:
        return positions(self.embedding, self.context)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, owner: str = "config") -> "ModelConfig":
        """`owner` names the file in errors."""
        given = read_fields(text, owner, cls)
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{owner}: {str(error).removeprefix('config: ')}") from None
