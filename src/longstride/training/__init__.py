"""Training (section 6 of the paper): `train(config)` writes a run, a folder with config, metrics, checkpoints and weights.

May import every room up to evaluation.
"""

from typing import TYPE_CHECKING

from longstride.common.lazy import lazy_names

__all__ = [
    "OptimizerConfig",
    "Summary",
    "TrainConfig",
    "train",
    "train_preset",
]

if TYPE_CHECKING:
    from longstride.training.config import OptimizerConfig, TrainConfig
    from longstride.training.loop import train
    from longstride.training.presets import train_preset
    from longstride.training.reporting import Summary
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "longstride.training.config": ["OptimizerConfig", "TrainConfig"],
            "longstride.training.loop": ["train"],
            "longstride.training.presets": ["train_preset"],
            "longstride.training.reporting": ["Summary"],
        },
    )
