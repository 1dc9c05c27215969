"""Longstride: the Sparse Transformer of Child, Gray, Radford and Sutskever (2019), whole and current."""

from longstride.patterns import (
    Block,
    Column,
    Dense,
    Dilated,
    Local,
    Pattern,
    Summary,
    connects,
    fixed,
    grid,
    strided,
)
from longstride.patterns.notation import parse
from longstride.attention import attend
from longstride.model import ModelConfig, SparseTransformer, preset
from longstride.evaluation import bits_per_byte
from longstride.sampling import generate
from longstride.version import __version__

__all__ = [
    "Pattern",
    "Dense",
    "Local",
    "Column",
    "Dilated",
    "Block",
    "Summary",
    "strided",
    "fixed",
    "grid",
    "connects",
    "parse",
    "attend",
    "ModelConfig",
    "SparseTransformer",
    "preset",
    "bits_per_byte",
    "generate",
    "__version__",
]
