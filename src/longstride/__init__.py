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
from longstride.notation import parse  # isort: skip  (the order of the flow)
from longstride.attention import attend  # isort: skip
from longstride.version import __version__  # isort: skip

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
    "__version__",
]
