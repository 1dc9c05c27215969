"""Patterns: which keys a query sees, in closed form; their notation as text.

May import common.
"""

from longstride.patterns.factorizations import connects, fixed, grid, strided
from longstride.patterns.leaves import Block, Column, Dense, Dilated, Local, Summary
from longstride.patterns.pattern import Leaf, Pattern, total_pairs, union

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
