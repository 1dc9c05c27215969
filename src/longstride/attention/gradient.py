"""Registers the backward custom op of an implementation as the gradient of its forward op, also under torch.func.

First derivatives in reverse mode are supported: `Tensor.backward`, `torch.func.grad`, `vjp` and `jacrev`. `vmap` is
supported for both ops: the mapped dimension joins the batch. Forward mode and second derivatives raise an error.

The rules are registered with the ops, so they add no cost to a call of `attend`, and they apply in compiled graphs too.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad


def register_gradient(forward: Any, backward: Any, impl: str) -> None:
    """Makes `backward` the gradient of `forward`. Both are custom ops; `impl` is their name in `attend`.

    forward(q, k, v, patterns, scale) returns the output and further tensors that backward needs;
    backward(gradient, q, k, v, output, ..., patterns, scale, needed) returns the gradients of q, k and v.
    """

    def refuse_tangents(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"attend: impl = {impl!r} has no forward-mode derivatives (torch.func.jvp, jacfwd, dual numbers); "
            "impl = 'reference' has them"
        )

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Any, q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float) -> Any:
            results = compute(q, k, v, patterns, scale)
            ctx.patterns, ctx.scale = patterns, scale
            ctx.save_for_backward(q, k, v, *results)
            ctx.mark_non_differentiable(*results[1:])
            return results

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
            needed = list(ctx.needs_input_grad[1:4])
            gradients = backward(gradient, *ctx.saved_tensors, ctx.patterns, ctx.scale, needed)
            return None, *(x if wanted else None for x, wanted in zip(gradients, needed)), None, None

        jvp = staticmethod(refuse_tangents)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Any, *arguments: Any) -> Any:
            return compute(*arguments)

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise NotImplementedError(
                f"attend: impl = {impl!r} can be differentiated once, not twice; impl = 'reference' can be, at any order"
            )

        jvp = staticmethod(refuse_tangents)

    _register(forward, Forward)
    _register(backward, Backward)


def _register(op: Any, function: Any) -> None:
    """Makes an autograd.Function the op's autograd kernel, and registers the op's vmap rule."""

    def differentiable(keys: Any, *arguments: Any) -> Any:
        def compute(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op._opoverload.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        # Without a dual level there are no tangents. With one, PyTorch checks for tangents and calls `jvp` if there are any.
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not needs_grad and forward_ad._current_level < 0:
            return compute(*arguments)
        if torch._C._are_functorch_transforms_active():
            return _apply_one_transform(function, compute, *arguments)
        return function.apply(compute, *arguments)

    with warnings.catch_warnings():
        # This replaces the kernel that custom_op registered, and PyTorch warns about every replacement.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        op._lib.impl(op._name, differentiable, "Autograd", with_keyset=True, allow_override=True)
    op.register_vmap(_vmap_rule(op))


def _apply_one_transform(function: Any, compute: Any, *arguments: Any) -> Any:
    """Applies an autograd.Function at the current functorch transform; `compute` dispatches to the outer ones.

    An autograd.Function disables gradients inside. `compute` restores the previous state for the outer transforms.
    """
    grad_enabled, forward_grad_enabled = torch.is_grad_enabled(), forward_ad._is_fwd_grad_enabled()

    def compute_outer(*arguments: Any) -> Any:
        with torch.set_grad_enabled(grad_enabled), forward_ad._set_fwd_grad_enabled(forward_grad_enabled):
            return compute(*arguments)

    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(compute_outer, *arguments)


def _vmap_rule(op: Any) -> Any:
    def rule(info: Any, mapped: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        batch = 0

        def join_batch(x: Any, dim: int | None) -> Any:
            nonlocal batch
            if not isinstance(x, Tensor):
                return x
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            batch = x.shape[1]
            return x.flatten(0, 1).contiguous()  # Kernels expect the saved per-query tensors contiguous.

        results = op(*(join_batch(x, dim) for x, dim in zip(arguments, mapped)))
        # A gradient that is not needed is empty and has no batch.
        split = tuple(x.unflatten(0, (size, batch)) if x.dim() > 1 else x for x in results)
        return split, tuple(0 if x.dim() > 1 else None for x in results)

    return rule
