"""attend(): argument validation, and the call of the implementation.

Shapes: q, k [batch, heads, n, d_qk]; v [batch, heads, n, d_v]; the result [batch, heads, n, d_v]. `layout.py` has others.
"""

import operator
from collections.abc import Sequence
from math import sqrt
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from longstride.attention.blocked import attend_blocked
from longstride.attention.implementation import implementation_name
from longstride.attention.layout import lay_out, validate_shapes
from longstride.attention.precision import DTYPES, autocast_is_enabled, cast_as_autocast_would, without_autocast
from longstride.attention.reference import attend_reference
from longstride.common.checks import short_repr
from longstride.patterns import Pattern, notation


def _attend_triton(*arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    # Imported on first use, since Triton is optional.
    from longstride.attention.kernels.ops import attend_triton

    return attend_triton(*arguments)


IMPLEMENTATIONS = {"reference": attend_reference, "blocked": attend_blocked, "triton": _attend_triton}
"""Their arguments are (q, k, v, patterns of the heads, scale, documents, return_lse), with the shapes of `layout.py`."""
SCALE_LIMIT = 1e38  # About the largest float32.


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], *, scale: float | None = ..., impl: str = ...,
    offset: int | None = ..., documents: Sequence[int] | Tensor | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Sequence[Pattern], *, scale: float | None = ..., impl: str = ...,
    offset: int | None = ..., documents: Sequence[int] | Tensor | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    impl: str = "auto",
    offset: int | None = None,
    documents: Sequence[int] | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention over the pairs of a pattern: softmax(q k^T * scale) v, where a query sees only the pattern's keys.

    Args:
        q, k: [batch, heads, n, d_qk], of one dtype and device. Any n works; it need not be a multiple of a stride or tile.
            k and v may have fewer heads: query head h has the keys of head h // (heads of q / heads of k).
            q may have fewer positions, see `offset`.
        v: [batch, heads, n, d_v].
        pattern: One pattern for all heads of q, or a sequence with one per head. Query i never sees a key j > i.
        scale: Default 1 / sqrt(d_qk).
        impl: "auto" (default) is "triton" on a CUDA device and "blocked", plain PyTorch, elsewhere. "reference" is the
            definition, with n^2 memory. An implementation that cannot run is an error, never replaced by another.
        offset: Query r is at position offset + r among the keys. Default: the queries are the last ones, n_k - n_q.
        documents: Several documents in a row, which do not see each other; patterns count from a document's start. Lengths
            that add up to the number of keys; or an integer tensor [batch, n_k], read by the host, in which equal
            neighbours are of one document.
        return_lse: Also return the natural log-sum-exp of each query's scores, with gradients: `join` joins results over
            disjoint keys by it.

    Returns:
        [batch, heads, n, d_v]. A query that sees no key gets output 0 and gradient 0.
        With return_lse, the output and the lse, float32 (float64 for float64 inputs) [batch, heads, n], -inf for a query
        that sees no key.

    Example:
        >>> import torch
        >>> from longstride import Column, Local, attend
        >>> q, k, v = torch.randn(3, 1, 2, 100, 16).unbind()  # [batch, heads, n, d]
        >>> attend(q, k, v, Local(10) | Column(10)).shape  # both heads see both
        torch.Size([1, 2, 100, 16])
        >>> attend(q, k, v, [Local(10), Column(10)]).shape  # one pattern per head
        torch.Size([1, 2, 100, 16])

    Under autocast the inputs are cast to the region's dtype.

    NaN and infinity follow IEEE arithmetic over the keys that a query sees, in every implementation:

    - A score of NaN or +inf, also by overflow, makes the query's output NaN, and the gradients of all keys that it sees.
      Its lse is NaN; with +inf and no NaN, "reference" returns +inf, which is the log-sum-exp.
    - A score of -inf has weight 0. A query whose scores are all -inf gets output 0, like one that sees no key.
    - A NaN or infinity in a value reaches that component of the output of every query that sees it.
    - Keys and values that a query does not see do not affect its output or gradients, with one exception: "triton"
      multiplies whole tiles, and 0 * NaN is NaN. There a NaN or infinity in v may reach outputs, and any NaN or infinity
      may reach gradients, at other positions of the same head and batch entry. The same holds for "reference" under
      torch.compile and torch.func, and for NaN or infinity in an incoming gradient.
    """
    alike = _validate_tensors(q, k, v)
    if autocast_is_enabled(q.device):
        q, k, v = cast_as_autocast_would(q, k, v)
        with without_autocast(q.device):
            return attend(  # type: ignore[call-overload, no-any-return]
                q, k, v, pattern, scale=scale, impl=impl, offset=offset, documents=documents, return_lse=return_lse
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attend: q, k and v must have one dtype, got q {q.dtype}, k {k.dtype} and v {v.dtype}")
    if return_lse is not True and return_lse is not False:
        raise ValueError(f"attend: return_lse must be True or False, got {return_lse!r}")
    heads = _patterns_per_head(pattern, q.shape[1])
    name, scale = implementation_name(impl, q.device.type), _validate_scale(scale, q.shape[3])
    lengths: Sequence[int] = ()
    if not alike or offset is not None or documents is not None:
        k, v, lengths = lay_out(q, k, v, offset, documents)
    return IMPLEMENTATIONS[name](q, k, v, heads, scale, lengths, return_lse)


def attend_packed(packed: Tensor, sizes: Sequence[int], patterns: Sequence[Pattern], *, impl: str = "auto") -> Tensor:
    """`attend` for queries, keys and values side by side, as a projection makes them.

    Args:
        packed: [batch, n, sum(sizes)], and so is its gradient, which the Triton kernels write as it is.
        sizes: Widths of the queries, keys and values of all heads.
        patterns: One per head.

    Returns:
        [batch, heads, n, d_v].
    """
    patterns = _validate_patterns(patterns)
    q, k, v = unpack(packed, sizes, len(patterns))
    needs_grad = torch.is_grad_enabled() and packed.requires_grad
    if not needs_grad or autocast_is_enabled(packed.device) or implementation_name(impl, packed.device.type) != "triton":
        return attend(q, k, v, patterns, impl=impl)
    _validate_tensors(q, k, v)
    # Imported on first use, since Triton is optional.
    from longstride.attention.kernels.packed import attend_packed_triton

    return attend_packed_triton(packed, sizes, patterns, 1 / sqrt(q.shape[3]))


def unpack(packed: Tensor, sizes: Sequence[int], heads: int) -> list[Tensor]:
    """Returns the queries, keys and values of a packed tensor as views, [batch, heads, n, d]."""
    parts = packed.split(list(sizes), -1)  # type: ignore[no-untyped-call]
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts]


def attend_forward(q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern]) -> tuple[Tensor, Tensor]:
    """`attend` for a caller that keeps and frees the tensors itself: nothing is saved for a gradient.

    Returns the output [batch, heads, n, d_v], and the stats of each query that `attend_backward` needs.
    """
    forward = _operator(implementation_name("auto", q.device.type), "forward")
    results: tuple[Tensor, Tensor] = forward(q, k, v, notation.write(heads), 1 / sqrt(q.shape[3]), ())
    return results


def attend_backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Sequence[Tensor], heads: Sequence[Pattern]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v. `results`: of `attend_forward`."""
    backward = _operator(implementation_name("auto", q.device.type), "backward")
    gradients: tuple[Tensor, Tensor, Tensor] = backward(
        d_output, None, q, k, v, *results, notation.write(heads), 1 / sqrt(q.shape[3]), (), [True] * 3
    )
    return gradients


def _operator(impl: str, direction: str) -> Any:
    if impl == "triton":
        import longstride.attention.kernels.ops  # noqa: F401  # Defines the operators.
    return getattr(torch.ops.longstride, f"{impl}_{direction}").default


def _validate_tensors(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether q, k and v are alike: of the same heads and n."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"attend: {name} must be a tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise ValueError(f"attend: {name} is a {kind} tensor; give a dense one, and sequences in one row as documents")
        if x.dim() != 4:
            raise ValueError(f"attend: {name} must be [batch, heads, n, d], got {x.dim()} dimensions: {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"attend: {name} has dtype {x.dtype}; it must be float64, float32, bfloat16 or float16")
    batch, heads, n, d_qk = q.shape
    d_v = v.shape[3]
    if not (heads and n and d_qk and d_v):
        name, x = ("v", v) if heads and n and d_qk else ("q", q)
        raise ValueError(f"attend: {name} has shape {list(x.shape)}; heads, n and d must be at least 1 (batch may be 0)")
    alike = q.shape == k.shape and v.shape == (batch, heads, n, d_v)
    if not alike:
        validate_shapes(q, k, v)
    if not q.device == k.device == v.device:
        raise ValueError(f"attend: q, k and v must be on one device, got q {q.device}, k {k.device} and v {v.device}")
    return alike


def _patterns_per_head(pattern: Pattern | Sequence[Pattern], heads: int) -> list[Pattern]:
    if isinstance(pattern, Pattern):
        return [pattern] * operator.index(heads)  # torch.compile may make it symbolic, but takes no list of that length.
    patterns = _validate_patterns(pattern)
    if len(patterns) != heads:
        raise ValueError(f"attend: pattern has {len(patterns)} patterns for {heads} heads; give one, or one for each head")
    return patterns


def _validate_patterns(pattern: Sequence[Pattern]) -> list[Pattern]:
    if isinstance(pattern, str) or not isinstance(pattern, Sequence):
        raise ValueError(
            f"attend: pattern must be a Pattern or a sequence with one for each head, got {_no_pattern(pattern)}"
        )
    for index, head_pattern in enumerate(pattern):
        if not isinstance(head_pattern, Pattern):
            raise ValueError(f"attend: pattern[{index}] must be a Pattern, got {_no_pattern(head_pattern)}")
    return list(pattern)


def _no_pattern(given: object) -> str:
    """What was given in place of a pattern, and the fix, for an error message."""
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)}; masks are not taken, and causal attention is Dense()"
    if isinstance(given, type) and issubclass(given, Pattern):
        return f"the class {given.__name__}; give {given.__name__}(...)"
    return f"{short_repr(given)}; longstride.parse reads patterns from text" if isinstance(given, str) else short_repr(given)


def _validate_scale(scale: float | None, d_qk: int) -> float:
    if scale is None:
        return 1 / sqrt(d_qk)
    if not isinstance(scale, int | float | Real) or not -SCALE_LIMIT < scale < SCALE_LIMIT:
        # To torch.compile a NumPy number is an array, whose value the graph would have to wait for.
        if torch.compiler.is_compiling() and not isinstance(scale, int | float):
            raise ValueError(
                f"attend: scale under torch.compile must be a float or an int of Python, got {type(scale).__name__}; "
                "call float() on it outside of the compiled function"
            )
        raise ValueError(f"attend: scale must be a finite number or None for 1 / sqrt(d_qk), got {scale!r}")
    return float(scale)
