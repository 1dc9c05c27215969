"""Sampling: `generate` and its implementations, prompts from files, and output as text, images or sound.

May import every room up to training.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "generate",
]

if TYPE_CHECKING:
    from longstride.sampling.generation import generate
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.sampling.generation": ["generate"],
        },
    )
