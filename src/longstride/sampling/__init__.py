"""From a trained network to bytes: `generate`."""

from longstride.sampling.generate import generate

__all__ = ["generate"]
