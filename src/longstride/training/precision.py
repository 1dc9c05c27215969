"""Optimizer updates from finite gradients only, with loss scaling for float16."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from longstride.common.checks import finite_number, whole_number
from longstride.training.distributed import full_tensor

FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-14
"""Below this, overflows do not come from the scale."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""
GROWS_EVERY = 1000
"""Steps without an overflow until the scale is doubled."""


class Updates:
    """Backward passes and optimizer updates of a model."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], precision: str, clip: float, device: torch.device):
        self.model, self.optimizers, self.clip = model, optimizers, clip
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=FIRST_SCALE, growth_interval=GROWS_EVERY, enabled=precision == "float16"
        )

    @property
    def scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    @property
    def may_skip(self) -> bool:
        """Whether a step may be skipped: a smaller loss scale may still help."""
        return self.scale is not None and self.scale >= LEAST_SCALE

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def update(self, loss: float) -> tuple[float, bool]:
        """Updates the weights. Returns the gradient norm before clipping, and whether the weights changed.

        If the loss or the norm is not finite, no weight changes; in float16 the loss scale is halved.
        """
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = float(full_tensor(clip_grad_norm_(self.model.parameters(), self.clip)))
        safe = isfinite(norm) and isfinite(loss)
        if safe:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        if self.scaler.is_enabled():
            # GradScaler halves the scale by itself for non-finite gradients, but does not know the loss.
            halved = isfinite(norm) and not safe
            self.scaler.update(self.scaler.get_scale() / 2 if halved else None)
        self.model.zero_grad(set_to_none=True)
        return norm, safe

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state(self, state: Any) -> None:
        """Restores the loss scale from a checkpoint, which is untrusted."""
        if not self.scaler.is_enabled():
            return
        own = self.scaler.state_dict()
        if not isinstance(state, dict) or state.keys() != own.keys():
            raise ValueError(f"scaler must be an object with {', '.join(own)}")
        changing = ("scale", "_growth_tracker")
        for name in own.keys() - changing:
            if state[name] != own[name]:
                raise ValueError(f"scaler: {name} must be {own[name]}, got {state[name]!r}")
        if not 0 < finite_number("scaler", "scale", state["scale"]) <= LARGEST_SCALE:
            raise ValueError(f"scaler: scale must be more than 0 and at most {LARGEST_SCALE:g}, got {state['scale']!r}")
        if whole_number("scaler", "_growth_tracker", state["_growth_tracker"], 0) > GROWS_EVERY:
            raise ValueError(f"scaler: _growth_tracker must be at most {GROWS_EVERY}, got {state['_growth_tracker']}")
        self.scaler.load_state_dict(state)
