"""Muon with matrices of one shape in one stack: a chain of batched products instead of one chain for each matrix.

PyTorch's own Muon orthogonalizes one matrix after the other. On a GPU that is thousands of short kernels for a deep network,
and most of the step's time is their launches. State, hyperparameters and checkpoints are those of `torch.optim.Muon`;
results differ by the rounding of batched products. On a CPU, and for parameters that FSDP has split, PyTorch's loop runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr

LARGEST_STACK = 2**26
"""Numbers of a stack: its temporary tensors take some 10 bytes for each."""


class BatchedMuon(Muon):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with_gradient = [x for group in self.param_groups for x in group["params"] if x.grad is not None]
        if not all(x.is_cuda and type(x.grad) is Tensor for x in with_gradient):
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_in_stacks()
        return loss

    @torch.no_grad()
    def step_in_stacks(self) -> None:
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            if not parameters:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for indices in _stacks(parameters):
                shape = parameters[indices[0]].shape
                stack = torch.stack([updates[index] for index in indices]).bfloat16()
                orthogonal = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                targets = [parameters[index] for index in indices]
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
                torch._foreach_add_(targets, list(orthogonal.to(targets[0].dtype).unbind()), alpha=-rate)


def orthogonalize(stack: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations on [matrices, rows, columns], as `torch.optim.Muon` does them for one matrix."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _stacks(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Returns the indices of matrices of one shape, in stacks of at most LARGEST_STACK numbers."""
    by_shape: dict[Any, list[int]] = {}
    for index, x in enumerate(parameters):
        by_shape.setdefault((x.shape, x.dtype, x.device), []).append(index)
    stacks = []
    for same in by_shape.values():
        most = max(1, LARGEST_STACK // parameters[same[0]].numel())
        stacks += [same[first : first + most] for first in range(0, len(same), most)]
    return stacks
