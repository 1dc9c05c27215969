"""The attention operator: `attend`, its oracle, and the fast implementations.

May import common and patterns.
"""

from longstride.attention.api import attend

__all__ = ["attend"]
