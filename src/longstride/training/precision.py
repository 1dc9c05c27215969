"""Optimizer updates from finite gradients only, with loss scaling for float16.

Whether an update is skipped is decided on the device, so that the host need not wait for it and a step can be part of a CUDA
graph. `Updates.stopped` is set by a step that is not finite and that no smaller loss scale would help. From then on nothing
changes, until the host has read the flag.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from longstride.common.checks import finite_number, whole_number
from longstride.training.distributed import full_tensor, local_tensor
from longstride.training.optimizer import rate_factors, set_learning_rate

FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-14
"""Below this, overflows do not come from the scale."""
LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""
GROWS_EVERY = 1000
"""Steps without an overflow until the scale is doubled."""


class LossScale:
    """The loss scale of float16: halved by an overflow, doubled after `growth_interval` steps without one."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(FIRST_SCALE, device=device)
        self.steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the scale last changed."""
        self.growth_interval = GROWS_EVERY

    def adjust(self, overflow: Tensor, stopped: Tensor) -> None:
        """Adjusts the scale after a step. `stopped`: leaves it as it is."""
        steps = self.steps + 1
        grows = ~overflow & (steps >= self.growth_interval)
        scale = torch.where(
            overflow, self.value / 2, torch.where(grows, (self.value * 2).clamp(max=LARGEST_SCALE), self.value)
        )
        self.value.copy_(torch.where(stopped, self.value, scale))
        self.steps.copy_(torch.where(stopped, self.steps, steps * ~(overflow | grows)))

    def state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint, with the names of PyTorch's GradScaler."""
        return {
            "scale": float(self.value),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.steps),
        }

    def load_state(self, state: Any) -> None:
        """Restores the scale from a checkpoint, which is untrusted."""
        own = self.state()
        if not isinstance(state, dict) or state.keys() != own.keys():
            raise ValueError(f"scaler must be an object with {', '.join(own)}")
        for name in own.keys() - ("scale", "_growth_tracker"):
            if state[name] != own[name]:
                raise ValueError(f"scaler: {name} must be {own[name]}, got {state[name]!r}")
        if not 0 < finite_number("scaler", "scale", state["scale"]) <= LARGEST_SCALE:
            raise ValueError(f"scaler: scale must be more than 0 and at most {LARGEST_SCALE:g}, got {state['scale']!r}")
        if whole_number("scaler", "_growth_tracker", state["_growth_tracker"], 0) > GROWS_EVERY:
            raise ValueError(f"scaler: _growth_tracker must be at most {GROWS_EVERY}, got {state['_growth_tracker']}")
        self.value.fill_(state["scale"])
        self.steps.fill_(state["_growth_tracker"])


class Updates:
    """Backward passes and optimizer updates of a model."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: str, clip: float, device: torch.device,
        waits: bool = True,
    ) -> None:  # fmt: skip
        """`waits`: the host waits for the check of the gradients and skips the optimizers' steps. Otherwise these read the
        check and the learning rate from the device, as PyTorch's fused optimizers can (`can_skip_on_device`)."""
        self.model, self.optimizers, self.clip, self.waits = model, optimizers, clip, waits
        self.loss_scale = LossScale(device) if precision == "float16" else None
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.learning_rates = {factor: torch.zeros((), device=device) for factor in rate_factors(optimizers)}
        """By the groups' factors, on the device, where a captured step reads them."""
        if not waits:
            for optimizer in optimizers:
                optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]

    @property
    def scale(self) -> float | None:
        return None if self.loss_scale is None else float(self.loss_scale.value)

    def set_learning_rate(self, rate: float) -> None:
        for factor, tensor in self.learning_rates.items():
            tensor.fill_(rate * factor)
        set_learning_rate(self.optimizers, rate, None if self.waits else self.learning_rates)

    def backward(self, loss: Tensor) -> None:
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
        scaled.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the weights. Returns the gradient norm before clipping, and whether the update was skipped.

        If the loss or the norm is not finite, no weight and no optimizer's state changes; in float16 the loss scale is
        halved. Once `stopped` is set, nothing changes at all.
        """
        if self.loss_scale is not None:
            gradients = [local_tensor(x.grad) for x in self.model.parameters() if x.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        norm = full_tensor(clip_grad_norm_(self.model.parameters(), self.clip))
        overflow = ~(norm.isfinite() & loss.isfinite())
        skipped = overflow | self.stopped
        self.found_inf.copy_(skipped)
        if not self.waits or not skipped:
            for optimizer in self.optimizers:
                optimizer.step()
        if self.loss_scale is None:
            self.stopped |= overflow
        else:
            self.loss_scale.adjust(overflow, self.stopped)
            self.stopped |= overflow & (self.loss_scale.value < LEAST_SCALE)
        self.model.zero_grad(set_to_none=True)
        return norm, skipped

    def state(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else self.loss_scale.state()

    def load_state(self, state: Any) -> None:
        """Restores the loss scale from a checkpoint, which is untrusted."""
        if self.loss_scale is not None:
            self.loss_scale.load_state(state)
