"""Patterns: which keys a query sees, in closed form; their notation as text.

May import common.
"""

from longstride.patterns.leaves import (
    Block,
    Column,
    Dense,
    Dilated,
    Leaf,
    Local,
    Pattern,
    Summary,
    connects,
    fixed,
    grid,
    strided,
    total_pairs,
    union,
)

__all__ = [
    "Pattern",
    "Leaf",
    "Dilated",
    "Dense",
    "Local",
    "Column",
    "Block",
    "Summary",
    "union",
    "strided",
    "fixed",
    "grid",
    "connects",
    "total_pairs",
]
