"""Compilation of a training step's kernels in parallel, before the first step, which would wait for one after the other."""

from collections.abc import Callable

import torch
from torch import nn

from longstride.attention.kernels.compilation import compile_only
from longstride.model.recompute import IN_PARTS
from longstride.training.config import TrainConfig


def compiles_first(config: TrainConfig, device: torch.device, is_wrapped: bool) -> bool:
    """Whether a pass that only compiles kernels comes before the first step.

    Not if all blocks are computed in parts: the pass runs PyTorch's part of a step, which takes long then. `is_wrapped`: in
    DDP, which has had a pass of its own (`ParallelModel`), or in FSDP."""
    return device.type == "cuda" and not is_wrapped and not set(config.model.recomputed) <= set(IN_PARTS)


def compile_kernels(model: nn.Module, forward_and_backward: Callable[[], None]) -> None:
    """Compiles our kernels of a forward and backward pass of the model.

    PyTorch's kernels, such as matrix products, run on memory that ours have not filled; the gradients are dropped."""
    try:
        with compile_only(), torch.autograd.set_detect_anomaly(False):  # Anomalies of such memory say nothing.
            forward_and_backward()
    finally:
        model.zero_grad(set_to_none=True)
