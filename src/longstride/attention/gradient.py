"""An implementation's two PyTorch operators, of which the second is the gradient of the first, also under torch.func.

First derivatives in reverse mode are supported: `Tensor.backward`, `torch.func.grad`, `vjp` and `jacrev`. `vmap` is
supported for both ops: the mapped dimension joins the batch. Forward mode and second derivatives raise an error.

The rules are registered with the ops, so they add no cost to a call of `attend`, and they apply in compiled graphs too.
Plain functions registered with a `torch.library.Library` are called 25 us sooner than those of `torch.library.custom_op`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from longstride.patterns import notation

LIBRARY = torch.library.Library("longstride", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_ops(impl: str, forward: Any, forward_like: Any, fill_gradients: Any, like: Any, by_query: Sequence[str]) -> Any:
    """Defines longstride::{impl}_forward, and longstride::{impl}_backward, which differentiates it, and their flop formulas.

    forward(q, k, v, patterns, scale) returns the output, and the tensors named `by_query` that backward needs.
    forward_like has the same arguments, and returns tensors of the same shapes and strides.
    fill_gradients(gradients, d_output, (q, k, v), saved, patterns, scale, needed) computes the gradients of q, k and v from
    what forward returned; one that is not needed is empty.
    like(x) returns an empty tensor for the gradient of x.

    Returns the function behind the backward op.
    """

    def backward_like(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(like(x) if wanted else x.new_empty(0) for x, wanted in zip((q, k, v), others[-1]))

    def backward(d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *saved, patterns, scale, needed = others
        gradients = backward_like(d_output, q, k, v, needed)
        fill_gradients(gradients, d_output, (q, k, v), saved, patterns, scale, needed)
        return gradients

    inputs, settings = "Tensor q, Tensor k, Tensor v", "str patterns, float scale"
    saved = "".join(f", Tensor {name}" for name in ("output", *by_query))
    results = f"(Tensor{', Tensor' * len(by_query)})"
    forward_op = define(f"{impl}_forward", f"({inputs}, {settings}) -> {results}", forward, forward_like, forward_flops)
    schema = f"(Tensor d_output, {inputs}{saved}, {settings}, bool[] needed) -> (Tensor, Tensor, Tensor)"
    backward_op = define(f"{impl}_backward", schema, backward, backward_like, backward_flops)
    _register_gradient(forward_op, backward_op, impl)
    return backward


def define(name: str, schema: str, compute: Any, like: Any, flops: Any) -> Any:
    """Defines and returns the operator longstride::name. `like`: as `compute`, but returns empty tensors."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"longstride::{name}", like, lib=LIBRARY)
    op = getattr(torch.ops.longstride, name)
    register_flop_formula(op)(flops)
    return op.default


def forward_flops(q: Any, k: Any, v: Any, patterns: str, *_: Any, **__: Any) -> int:
    """Two products per pair of the patterns: query with key, and weight with value."""
    return int(2 * q[0] * (q[3] + v[3]) * _pairs(patterns, q[2]))


def backward_flops(d_output: Any, q: Any, k: Any, v: Any, *others: Any, **__: Any) -> int:
    """Five products per pair: the recomputed score, and the gradients of weight, value, query and key."""
    patterns = next(argument for argument in others if isinstance(argument, str))
    return int(2 * q[0] * (3 * q[3] + 2 * v[3]) * _pairs(patterns, q[2]))


def _pairs(patterns: str, n: int) -> int:
    return sum(pattern.pairs(n) for pattern in notation.parse(patterns))


def _register_gradient(forward: Any, backward: Any, impl: str) -> None:
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
                return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        # Without a dual level there are no tangents. With one, PyTorch checks for tangents and calls `jvp` if there are any.
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not needs_grad and forward_ad._current_level < 0:
            return compute(*arguments)
        if torch._C._are_functorch_transforms_active():
            return _apply_one_transform(function, compute, *arguments)
        return function.apply(compute, *arguments)

    LIBRARY.impl(op._opname, differentiable, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.library.register_vmap(op.name(), _vmap_rule(op), lib=LIBRARY)


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
