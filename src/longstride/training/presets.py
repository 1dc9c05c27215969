"""Training settings of each model preset. The paper states epochs and some learning rates; the rest is chosen here.

Steps follow from epochs of the data set at that batch: 120 of CIFAR-10's 48,000 images, 80 of enwik8's 90 million bytes, 70
of ImageNet's 1.28 million images.
"""

from dataclasses import replace
from typing import Any

from longstride.model import preset
from longstride.training.config import OptimizerConfig, TrainConfig

PAPER = OptimizerConfig()
SMALL = OptimizerConfig(name="muon", learning_rate=0.006, warmup=50, beta2=0.99)
"""Small networks have minutes, not days: Muon brings text-small to 3.1 bits where AdamW has 4.3 (docs/log.md)."""
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10": {"steps": 180_000, "batch": 32, "optimizer": PAPER, "patience": 20},
    "enwik8": {"steps": 73_000, "batch": 8, "optimizer": PAPER, "patience": 20},
    "imagenet64": {"steps": 700_000, "batch": 128, "accumulate": 16, "optimizer": PAPER},
    "music-65536": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "music-262144": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "music-1048576": {"steps": 100_000, "batch": 1, "optimizer": PAPER},
    "text-small": {"steps": 1000, "batch": 4, "optimizer": SMALL, "validate_every": 200, "validate_bytes": 2**16},
    "image-small": {"steps": 1000, "batch": 4, "optimizer": SMALL, "validate_every": 200, "validate_bytes": 2**16},
    "audio-small": {"steps": 1000, "batch": 2, "optimizer": SMALL, "validate_every": 200, "validate_bytes": 2**16},
}


def train_preset(name: str, **changes: Any) -> TrainConfig:
    """The preset of that name, ready to be trained. `changes` are fields of TrainConfig."""
    model = preset(name)
    return replace(TrainConfig(model=model, **SETTINGS[name.removesuffix("-dense")]), **changes)
