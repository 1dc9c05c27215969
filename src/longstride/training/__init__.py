"""Training (section 6 of the paper): `train(config)` makes a run, a folder with everything about it.

May import every room up to evaluation.
"""

from longstride.training.config import OptimizerConfig, TrainConfig
from longstride.training.presets import train_preset
from longstride.training.trainer import Summary, train

__all__ = ["OptimizerConfig", "Summary", "TrainConfig", "train", "train_preset"]
