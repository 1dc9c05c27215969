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

from longstride.attention.layout import layout_documents
from longstride.patterns import notation

LIBRARY = torch.library.Library("longstride", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_ops(
    impl: str, forward: Any, forward_like: Any, fill_gradients: Any, like: Any, by_query: Sequence[str], layout: bool = False
) -> Any:  # fmt: skip
    """Defines longstride::{impl}_forward, and longstride::{impl}_backward, which differentiates it, and their flop formulas.

    forward(q, k, v, patterns, scale) returns the output, and the tensors named `by_query` that backward needs.
    forward_like has the same arguments, and returns tensors of the same shapes and strides.
    fill_gradients(gradients, d_output, (q, k, v), saved, patterns, scale, needed) computes the gradients of q, k and v from
    what forward returned; one that is not needed is empty.
    like(x) returns an empty tensor for the gradient of x.

    layout: the operators are {impl}_layout_forward and {impl}_layout_backward. q, k and v have the shapes of `layout.py`,
    `documents` follows `scale`, the second result of forward is the lse, and d_lse, which may be None, follows d_output.

    Returns the function behind the backward op.
    """
    # Where q, k and v begin among the arguments of backward, what was saved, and the settings.
    first = 1 + layout
    first_saved = first + 3
    first_setting = first_saved + 1 + len(by_query)

    def empty_gradients(inputs: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, ...]:
        return tuple(like(x) if wanted else x.new_empty(0) for x, wanted in zip(inputs, needed))

    def backward_like(*arguments: Any) -> tuple[Tensor, ...]:
        return empty_gradients(arguments[first:first_saved], arguments[-1])

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs = arguments[first:first_saved]
        gradients = empty_gradients(inputs, arguments[-1])
        fill_gradients(
            gradients, *arguments[:first], inputs, arguments[first_saved:first_setting], *arguments[first_setting:]
        )
        return gradients

    def flops(*arguments: Any, **_: Any) -> int:
        return backward_flops(*arguments[first:first_saved], *arguments[first_setting:-1])

    inputs, settings = "Tensor q, Tensor k, Tensor v", "str patterns, float scale"
    slopes, name = "Tensor d_output", impl
    if layout:
        settings, slopes, name = f"{settings}, int[] documents", f"{slopes}, Tensor? d_lse", f"{impl}_layout"
    saved = "".join(f", Tensor {name}" for name in ("output", *by_query))
    results = f"(Tensor{', Tensor' * (len(by_query) + layout)})"
    forward_op = define(f"{name}_forward", f"({inputs}, {settings}) -> {results}", forward, forward_like, forward_flops)
    schema = f"({slopes}, {inputs}{saved}, {settings}, bool[] needed) -> (Tensor, Tensor, Tensor)"
    backward_op = define(f"{name}_backward", schema, backward, backward_like, flops)
    _register_gradient(forward_op, backward_op, impl, first)
    return backward


def define(name: str, schema: str, compute: Any, like: Any, flops: Any) -> Any:
    """Defines and returns the operator longstride::name. `like`: as `compute`, but returns empty tensors."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"longstride::{name}", like, lib=LIBRARY)
    op = getattr(torch.ops.longstride, name)
    register_flop_formula(op)(flops)
    return op.default


def forward_flops(q: Any, k: Any, v: Any, patterns: str, scale: float, documents: Sequence[int] = (), **_: Any) -> int:
    """Two products per pair of the patterns: query with key, and weight with value."""
    return int(2 * (q[3] + v[3]) * _pairs(patterns, q, k, documents))


def backward_flops(q: Any, k: Any, v: Any, patterns: str, scale: float, documents: Sequence[int] = ()) -> int:
    """Five products per pair: the recomputed score, and the gradients of weight, value, query and key."""
    return int(2 * (3 * q[3] + 2 * v[3]) * _pairs(patterns, q, k, documents))


def _pairs(patterns: str, q: Sequence[int], k: Sequence[int], documents: Sequence[int]) -> int:
    """Pairs of the whole batch. Queries before a document's first one would see keys before it, and no others."""
    heads = notation.parse(patterns)
    total = 0
    for document in layout_documents(q, k, documents):
        keys, offset = document.keys.stop - document.keys.start, document.offset
        pairs = sum(pattern.pairs(keys) - pattern.pairs(offset) for pattern in heads)
        total += pairs * (document.batch.stop - document.batch.start)
    return total


def _refuse_tangents(impl: str) -> Any:
    """Returns the `jvp` of an autograd.Function that has no forward mode."""

    def jvp(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"attend: impl = {impl!r} has no forward-mode derivatives (torch.func.jvp, jacfwd, dual numbers); "
            "impl = 'reference' has them"
        )

    return staticmethod(jvp)


def _register_gradient(forward: Any, backward: Any, impl: str, slopes: int) -> None:
    """slopes: how many results have gradients; they come first."""

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Any:
            results = compute(q, k, v, *settings)
            ctx.settings = settings
            ctx.save_for_backward(q, k, v, results[0], *results[slopes:])
            ctx.mark_non_differentiable(*results[slopes:])
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx: Any, d_output: Tensor | None, *others: Tensor | None) -> Any:
            needed = list(ctx.needs_input_grad[1:4])
            saved = ctx.saved_tensors
            if d_output is None:
                d_output = torch.zeros_like(saved[3])
            gradients = backward(d_output, *others[: slopes - 1], *saved, *ctx.settings, needed)
            return None, *(x if wanted else None for x, wanted in zip(gradients, needed)), *[None] * len(ctx.settings)

        jvp = _refuse_tangents(impl)

    _register(forward, Forward, keys_at=1)
    register_last(backward, impl, keys_at=slopes + 1)


def register_last(op: Any, impl: str, keys_at: int | None) -> None:
    """Registers an op that computes gradients: its own derivatives raise an error. `keys_at`: as in `_register`."""

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Any, *arguments: Any) -> Any:
            return compute(*arguments)

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise NotImplementedError(
                f"attend: impl = {impl!r} can be differentiated once, not twice; impl = 'reference' can be, at any order"
            )

        jvp = _refuse_tangents(impl)

    _register(op, Last, keys_at)


def _register(op: Any, function: Any, keys_at: int | None) -> None:
    """Makes an autograd.Function the op's autograd kernel, and registers the op's vmap rule.

    keys_at: the index of k; None for an op without documents.
    """

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
    torch.library.register_vmap(op.name(), _vmap_rule(op, keys_at), lib=LIBRARY)


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


def _vmap_rule(op: Any, keys_at: int | None) -> Any:
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

        def split(x: Any) -> Any:
            # A gradient that is not needed is empty and has no batch.
            return x.unflatten(0, (size, batch)) if x.dim() > 1 else x

        joined = [join_batch(x, dim) for x, dim in zip(arguments, mapped)]
        if keys_at is not None:
            n = joined[keys_at].shape[2]
            joined = [_for_each(x, size, n) for x in joined]
        results = op(*joined)
        if isinstance(results, Tensor):
            return split(results), 0
        return tuple(map(split, results)), tuple(0 if x.dim() > 1 else None for x in results)

    return rule


def _for_each(argument: Any, size: int, n: int) -> Any:
    """Documents of each row, which add up to more than n, once for each of `size` entries; other arguments as they are."""
    of_rows = isinstance(argument, list | tuple) and sum(argument) > n and not isinstance(argument[0], bool)
    return list(argument) * size if of_rows else argument
