"""The attention operator: `attend`, its oracle, the fast implementations, and `join`.

May import common and patterns.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "attend",
    "join",
]

if TYPE_CHECKING:
    from longstride.attention.api import attend
    from longstride.attention.join_results import join
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.attention.api": ["attend"],
            "longstride.attention.join_results": ["join"],
        },
    )
