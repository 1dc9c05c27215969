"""The attention operator: `attend`, an oracle, and what runs fast."""

from longstride.attention.api import attend

__all__ = ["attend"]
