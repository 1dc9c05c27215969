"""The Sparse Transformer: bytes in, logits out."""

from longstride.model.config import ModelConfig
from longstride.model.presets import PRESETS, preset
from longstride.model.transformer import SparseTransformer

__all__ = ["PRESETS", "ModelConfig", "SparseTransformer", "preset"]
