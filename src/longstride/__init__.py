"""Longstride: the Sparse Transformer of Child, Gray, Radford and Sutskever (2019), whole and current."""

from longstride.common.lazy import lazy_names
from longstride.version import __version__

TYPE_CHECKING = False  # True for type checkers. `typing` itself takes as long to import as all the rest here.

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

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.patterns.pattern": ["Pattern"],
            "longstride.patterns.leaves": ["Block", "Column", "Dense", "Dilated", "Local", "Summary"],
            "longstride.patterns.factorizations": ["connects", "fixed", "grid", "strided"],
            "longstride.patterns.notation": ["parse"],
            "longstride.attention.api": ["attend"],
            "longstride.model.config": ["ModelConfig"],
            "longstride.model.transformer": ["SparseTransformer"],
            "longstride.model.presets": ["preset"],
            "longstride.evaluation.scoring": ["bits_per_byte"],
            "longstride.sampling.generation": ["generate"],
        },
    )
