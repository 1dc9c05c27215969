"""Joins the two custom ops of an implementation into one differentiable operator, under PyTorch's transforms as well.

Reverse mode is supported once: `Tensor.backward`, `torch.func.grad`, `vjp` and `jacrev`. `vmap` is supported in both
directions: the mapped dimension joins the batch. Forward mode and second derivatives are refused by name.

The rules belong to the ops themselves, so they cost a call of `attend` nothing, and a compiled graph has them too.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad


def join(forward: Any, backward: Any, impl: str) -> None:
    """Makes `backward` the gradient of `forward`, both made by `torch.library.custom_op`; impl is their name in `attend`.

    forward(q, k, v, patterns, scale) gives the output and what backward needs besides;
    backward(gradient, q, k, v, output, ..., patterns, scale, needed) gives the gradients of q, k and v.
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
    """Makes an autograd.Function the op's kernel for autograd, and the batch what `vmap` maps over."""

    def differentiable(keys: Any, *arguments: Any) -> Any:
        def compute(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op._opoverload.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        # Without a dual level there are no tangents; with one PyTorch looks for them, and calls `jvp` if there are any.
        by_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not by_gradient and forward_ad._current_level < 0:
            return compute(*arguments)
        if torch._C._are_functorch_transforms_active():
            return _apply_one_transform(function, compute, *arguments)
        return function.apply(compute, *arguments)

    with warnings.catch_warnings():
        # It replaces the kernel that custom_op made, and PyTorch warns of any that is replaced.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        op._lib.impl(op._name, differentiable, "Autograd", with_keyset=True, allow_override=True)
    op.register_vmap(_vmap_rule(op))


def _apply_one_transform(function: Any, compute: Any, *arguments: Any) -> Any:
    """An autograd.Function at the transform that the dispatcher has come to; `compute` goes on to the outer ones.

    An autograd.Function turns gradients off inside of it. The outer transforms need them as they were.
    """
    by_gradient, by_tangent = torch.is_grad_enabled(), forward_ad._is_fwd_grad_enabled()

    def compute_outer(*arguments: Any) -> Any:
        with torch.set_grad_enabled(by_gradient), forward_ad._set_fwd_grad_enabled(by_tangent):
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
            return x.flatten(0, 1).contiguous()  # What forward saves for each query is expected so.

        results = op(*(join_batch(x, dim) for x, dim in zip(arguments, mapped)))
        # A gradient that is not needed is left empty and has no batch.
        split = tuple(x.unflatten(0, (size, batch)) if x.dim() > 1 else x for x in results)
        return split, tuple(0 if x.dim() > 1 else None for x in results)

    return rule
