"""The Sparse Transformer: bytes in, logits out; presets, cost, saved models, inspection of weights.

May import common, patterns and attention.
"""

from longstride.model.config import ModelConfig
from longstride.model.presets import PRESETS, preset
from longstride.model.transformer import SparseTransformer

__all__ = ["PRESETS", "ModelConfig", "SparseTransformer", "preset"]
