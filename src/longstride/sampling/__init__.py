"""From a trained network to bytes: `generate`, and what a person asks for and gets.

May import every room up to training.
"""

from longstride.sampling.generate import generate

__all__ = ["generate"]
