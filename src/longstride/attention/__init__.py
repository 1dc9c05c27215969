"""The attention operator: `attend`, its oracle, and the fast implementations.

May import common and patterns.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "attend",
]

if TYPE_CHECKING:
    from longstride.attention.api import attend
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.attention.api": ["attend"],
        },
    )
