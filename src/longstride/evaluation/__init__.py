"""Bits per byte, and the files that keep them.

May import common, patterns, attention, model and data.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "Score",
    "bits_per_byte",
]

if TYPE_CHECKING:
    from longstride.evaluation.scoring import Score, bits_per_byte
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.evaluation.scoring": ["Score", "bits_per_byte"],
        },
    )
