"""From gradients to a step that is safe: scaled losses for float16, and no step from numbers that are not finite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

FIRST_SCALE = 2.0**16
GROWS_EVERY = 1000
"""Steps without an overflow until the scale is doubled."""


class Steps:
    """Backward passes and optimizer steps of a model in one precision."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], precision: str, clip: float, device: torch.device):
        self.model, self.optimizers, self.clip = model, optimizers, clip
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=FIRST_SCALE, growth_interval=GROWS_EVERY, enabled=precision == "float16"
        )

    @property
    def scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> tuple[float, bool]:
        """The gradients' norm before it is clipped, and whether the weights were changed.

        In float16 an overflow skips the step and halves the scale. In other precisions nothing explains one: the caller
        finds a norm that is not finite, and weights as they were.
        """
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = clip_grad_norm_(self.model.parameters(), self.clip).item()
        finite = norm == norm and abs(norm) != float("inf")
        if finite or self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)  # Which does nothing where it has found an overflow.
            self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        return norm, finite

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state)
