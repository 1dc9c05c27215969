"""An implementation's two PyTorch operators, of which the second is the gradient of the first, also under torch.func.

First derivatives in reverse mode are supported: `Tensor.backward`, `torch.func.grad`, `vjp` and `jacrev`. `vmap` is
supported for both ops: the mapped dimension joins the batch. Forward mode and second derivatives raise an error.

The rules are registered with the ops, so they add no cost to a call of `attend`, and they apply in compiled graphs too.
A call of plain functions registered with a `torch.library.Library` takes 25 us less than one of `torch.library.custom_op`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from longstride.attention.layout import layout_documents
from longstride.patterns import notation

LIBRARY = torch.library.Library("longstride", "FRAGMENT")  # type: ignore[no-untyped-call]
_functions: dict[Any, Any] = {}
"""The Python function behind each operator."""


def define_ops(impl: str, forward: Any, forward_like: Any, fill_gradients: Any, like: Any) -> Any:
    """Defines longstride::{impl}_forward, and longstride::{impl}_backward, which differentiates it, and their flop formulas.

    forward(q, k, v, patterns, scale, documents) returns the output, and the stats of each query, from which the lse follows.
    Shapes and documents are those of `layout.py`; without documents, and with equal shapes, it is a plain call.
    forward_like has the same arguments, and returns tensors of the same shapes and strides.
    fill_gradients(gradients, d_output, d_stats, (q, k, v), (output, stats), patterns, scale, documents, needed) computes the
    gradients of q, k and v; one that is not needed is empty. d_stats is None if the stats have no gradient.
    like(x) returns an empty tensor for the gradient of x.

    Returns the function behind the backward op.
    """

    def empty_gradients(inputs: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor, ...]:
        return tuple(like(x) if wanted else x.new_empty(0) for x, wanted in zip(inputs, needed))

    def backward_like(d_output: Any, d_stats: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return empty_gradients((q, k, v), others[-1])

    def backward(
        d_output: Tensor, d_stats: Tensor | None, q: Tensor, k: Tensor, v: Tensor, output: Tensor, stats: Tensor,
        patterns: str, scale: float, documents: Sequence[int], needed: Sequence[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs = q, k, v
        gradients = empty_gradients(inputs, needed)
        fill_gradients(gradients, d_output, d_stats, inputs, (output, stats), patterns, scale, documents, needed)
        return gradients

    def flops(d_output: Any, d_stats: Any, q: Any, k: Any, v: Any, output: Any, stats: Any, *settings: Any, **_: Any) -> int:
        return backward_flops(q, k, v, *settings[:-1])

    inputs, settings = "Tensor q, Tensor k, Tensor v", "str patterns, float scale, SymInt[] documents"
    schema = f"({inputs}, {settings}) -> (Tensor, Tensor)"
    forward_op = define(f"{impl}_forward", schema, forward, forward_like, forward_flops)
    given = f"Tensor d_output, Tensor? d_stats, {inputs}, Tensor output, Tensor stats, {settings}, bool[] needed"
    backward_op = define(f"{impl}_backward", f"({given}) -> (Tensor, Tensor, Tensor)", backward, backward_like, flops)
    _register_gradient(forward_op, backward_op, impl)
    return backward


def define(name: str, schema: str, compute: Any, like: Any, flops: Any) -> Any:
    """Defines and returns the operator longstride::name. `like`: as `compute`, but returns empty tensors."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"longstride::{name}", like, lib=LIBRARY)
    op = getattr(torch.ops.longstride, name)
    register_flop_formula(op)(flops)
    _functions[op.default] = compute
    return op.default


def forward_flops(q: Any, k: Any, v: Any, patterns: str, scale: float, documents: Sequence[int], **_: Any) -> int:
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
        pairs = sum(pattern.pairs(document.n) - pattern.pairs(document.offset) for pattern in heads)
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


def _register_gradient(forward: Any, backward: Any, impl: str) -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, compute: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
            output, stats = compute(q, k, v, *settings)
            ctx.settings = settings
            ctx.save_for_backward(q, k, v, output, stats)
            ctx.set_materialize_grads(False)
            return output, stats

        @staticmethod
        def backward(ctx: Any, d_output: Tensor | None, d_stats: Tensor | None) -> Any:
            needed = list(ctx.needs_input_grad[1:4])
            saved = ctx.saved_tensors
            if d_output is None:
                d_output = torch.zeros_like(saved[3])
            gradients = backward(d_output, d_stats, *saved, *ctx.settings, needed)
            return None, *(x if wanted else None for x, wanted in zip(gradients, needed)), *[None] * len(ctx.settings)

        jvp = _refuse_tangents(impl)

    _register(forward, Forward)
    register_last(backward, impl)


def register_last(op: Any, impl: str) -> None:
    """Registers an op that computes gradients: its own derivatives raise an error."""

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

    _register(op, Last)


def needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether PyTorch's dispatcher must see the call: for a transform, a mode, a tensor subclass, a profiler, a tensor whose
    memory holds its numbers negated (`Tensor.is_neg`), or that has none, since it is on the meta device or known to be 0.

    Otherwise the operator's Python functions are called directly, which takes half the time.
    """
    for x in tensors:
        if type(x) is not Tensor or x.is_neg() or x._is_zerotensor() or is_legacy_batchedtensor(x):
            return True
    return (
        tensors[0].is_meta
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _profiler_enabled()
        or _get_tracing_state() is not None
    )


def _register(op: Any, function: Any) -> None:
    """Makes an autograd.Function the op's autograd kernel, and registers the op's vmap rule."""

    def differentiable(keys: Any, *arguments: Any) -> Any:
        def compute(*arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        # Without a dual level there are no tangents. With one, PyTorch checks for tangents and calls `jvp` if there are any.
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not needs_grad and forward_ad._current_level < 0:
            tensors = [x for x in arguments if isinstance(x, Tensor)]
            return (compute if needs_dispatcher(*tensors) else _functions[op])(*arguments)
        if _are_functorch_transforms_active():
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
    names = [argument.name for argument in op._schema.arguments]

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

        joined = {name: join_batch(x, dim) for name, x, dim in zip(names, arguments, mapped)}
        if "documents" in joined and sum(joined["documents"]) > joined["k"].shape[2]:  # Of each row, so once for each entry.
            joined["documents"] = list(joined["documents"]) * size
        results = op(*joined.values())
        if isinstance(results, Tensor):
            return split(results), 0
        return tuple(map(split, results)), tuple(0 if x.dim() > 1 else None for x in results)

    return rule
