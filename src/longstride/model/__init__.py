"""The Sparse Transformer: bytes in, logits out; presets, cost, saved models, inspection of weights.

May import common, patterns and attention.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "PRESETS",
    "ModelConfig",
    "SparseTransformer",
    "preset",
]

if TYPE_CHECKING:
    from longstride.model.config import ModelConfig
    from longstride.model.presets import PRESETS, preset
    from longstride.model.transformer import SparseTransformer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.model.config": ["ModelConfig"],
            "longstride.model.presets": ["PRESETS", "preset"],
            "longstride.model.transformer": ["SparseTransformer"],
        },
    )
