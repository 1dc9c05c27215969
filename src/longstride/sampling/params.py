"""SamplingParams: the distribution that bytes are drawn from. Imported without torch."""

from dataclasses import dataclass

from longstride.common.checks import finite_number, whole_number
from longstride.model.config import BYTES

LOWEST_TEMPERATURE = 0.001
"""Logits divided by a lower temperature might not be finite."""


@dataclass(frozen=True)
class SamplingParams:
    """Temperature and filters of the distribution that bytes are drawn from."""

    temperature: float = 1.0
    """Divides the logits: below 1 likely bytes become likelier; 1 leaves the model's distribution unchanged."""
    top_k: int | None = None
    """Only the k most likely bytes."""
    top_p: float | None = None
    """Only the smallest set of most likely bytes with at least this total probability."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, finite_number("generate", name, getattr(self, name)))
        if self.temperature < LOWEST_TEMPERATURE:
            hint = "; top_k = 1 takes the most likely byte" if self.temperature >= 0 else ""
            raise ValueError(f"generate: temperature must be at least {LOWEST_TEMPERATURE}, got {self.temperature}{hint}")
        if self.top_k is not None and whole_number("generate", "top_k", self.top_k, 1) > BYTES:
            raise ValueError(f"generate: top_k must be at most {BYTES}, as there are no more bytes, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p must be above 0 and at most 1, got {self.top_p}")

    @property
    def has_filter(self) -> bool:
        """Whether top_k or top_p is set."""
        return self.top_k is not None or self.top_p is not None
