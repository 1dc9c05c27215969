"""Muon with matrices of one shape in one stack: a chain of batched products instead of one chain for each matrix.

PyTorch's own Muon orthogonalizes one matrix after the other. On a GPU that is thousands of short kernels for a deep network,
and most of the step's time is their launches. State, hyperparameters and checkpoints are those of `torch.optim.Muon`;
results differ by the rounding of batched products. On a CPU, and for parameters that FSDP has split, PyTorch's loop runs.
Where several processes have the same weights (DDP), each orthogonalizes its share of a stack and gathers the others'.

Like PyTorch's fused optimizers it reads `found_inf`, a tensor on the device: if that is 1, a step changes nothing. So the
host need not wait to learn whether the gradients are finite, and a step can be part of a CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr

from longstride.training.ranks import SINGLE_RANK, Ranks

ROWS = "rows"
"""Key of a parameter group whose matrices are several in one: the number of rows of each of these."""
LARGEST_STACK = 2**26
"""Numbers of a stack: its temporary tensors take some 10 bytes for each."""


class BatchedMuon(Muon):
    found_inf: Tensor | None = None
    ranks: Ranks = SINGLE_RANK
    """The processes that have the same weights and gradients, and share the work."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with_gradient = [x for group in self.param_groups for x in group["params"] if x.grad is not None]
        in_stacks = all(x.is_cuda for x in with_gradient) or any(ROWS in group for group in self.param_groups)
        if self.found_inf is None and not (in_stacks and all(type(x.grad) is Tensor for x in with_gradient)):
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
            learning_rate = group["lr"] if self.found_inf is None else group["lr"] * (1 - self.found_inf)
            torch._foreach_mul_(parameters, 1 - learning_rate * group["weight_decay"])
            for indices in _stacks(parameters):
                targets = [parameters[index] for index in indices]
                own_momenta = [momenta[index] for index in indices]
                gradient, momentum = torch.stack([gradients[index] for index in indices]), torch.stack(own_momenta)
                if self.found_inf is not None:  # The mean of the momentum and itself is the momentum.
                    gradient = torch.where(self.found_inf > 0, momentum, gradient)
                momentum.lerp_(gradient, 1 - group["momentum"])
                torch._foreach_copy_(own_momenta, momentum.unbind())
                update = gradient.lerp_(momentum, group["momentum"]) if group["nesterov"] else momentum
                parts = []
                for part in torch.split(update.bfloat16(), group.get(ROWS) or update.shape[1], 1):
                    rate = _adjust_lr(learning_rate, group["adjust_lr_fn"], part.shape[1:])
                    parts.append(self._orthogonalize_shared(part, group).to(targets[0].dtype) * -rate)
                torch._foreach_add_(targets, torch.cat(parts, 1).unbind())

    def _orthogonalize_shared(self, stack: Tensor, group: dict[str, Any]) -> Tensor:
        iteration = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if self.ranks.count == 1:
            return orthogonalize(stack, *iteration)
        each = -(-len(stack) // self.ranks.count)
        own = stack[self.ranks.rank * each :][:each]
        share = stack.new_zeros(each, *stack.shape[1:])
        if len(own):
            share[: len(own)] = orthogonalize(own, *iteration)
        return self.ranks.gather(share).flatten(0, 1)[: len(stack)]


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
