"""Bits per byte, and the files that keep them.

May import common, patterns, attention, model and data.
"""

from longstride.evaluation.scoring import Score, bits_per_byte

__all__ = ["Score", "bits_per_byte"]
