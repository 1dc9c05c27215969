"""How queries and keys lie: fewer heads of keys than of queries, fewer queries than keys, several documents in a row.

Shapes: q [batch, heads_q, n_q, d_qk]; k [batch, heads_kv, n_k, d_qk]; v [batch, heads_kv, n_k, d_v]. Query head h has the
keys of head h // (heads_q / heads_kv). The queries are at the last n_q of the n_k positions.

`documents` are lengths that add up to n_k, for all rows; or to batch * n_k, one row after the other. Without any, a row is
one document.
"""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.nn import Parameter

from longstride.common.checks import short_repr


class Document(NamedTuple):
    """A part of some rows that attends to itself: slices of the batch, of the queries and of the keys."""

    batch: slice
    queries: slice
    keys: slice
    offset: int
    """Position of the first query among the keys."""

    @property
    def n(self) -> int:
        return self.keys.stop - self.keys.start  # type: ignore[no-any-return]


def layout_documents(q: Sequence[int], k: Sequence[int], lengths: Sequence[int]) -> list[Document]:
    """Returns the documents of q and k, which are shapes. Some may have no queries."""
    batch, n_k = k[0], k[2]
    offset = n_k - q[2]
    if not lengths:
        return [Document(slice(0, batch), slice(0, q[2]), slice(0, n_k), offset)]
    if sum(lengths) <= n_k:
        return _documents(slice(0, batch), lengths, offset)
    rows: list[list[int]] = [[] for _ in range(batch)]
    total = 0
    for length in lengths:
        rows[total // n_k].append(length)
        total += length
    return [part for row, some in enumerate(rows) for part in _documents(slice(row, row + 1), some, offset)]


def _documents(batch: slice, lengths: Sequence[int], offset: int) -> list[Document]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    found = []
    for start, end in pairwise(ends):
        first, last = max(start, offset), max(end, offset)
        found.append(Document(batch, slice(first - offset, last - offset), slice(start, end), min(first, end) - start))
    return found


def validate_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless heads of queries can share keys, and the queries are among the keys."""
    (batch, heads, n_q, d_qk), (_, kv_heads, n_k, _) = q.shape, k.shape
    shapes = f"got q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, as [batch, heads, n, d]"
    if k.shape[0] != batch or k.shape[3] != d_qk:
        raise ValueError(f"attend: q and k must have the same batch and the same d_qk, {shapes}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"attend: v must have k's batch, heads and n, {shapes}")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"attend: the heads of q must be a multiple of those of k and v, {shapes}")
    if n_q > n_k:
        raise ValueError(f"attend: q must not have more positions than k and v, {shapes}")


def lay_out(
    q: Tensor, k: Tensor, v: Tensor, offset: int | None, documents: Sequence[int] | Tensor | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Returns k and v without the keys after the last query, and the documents of the others. ValueError for bad ones."""
    n_q, n_k = q.shape[2], k.shape[2]
    end = n_k
    if offset is not None:
        first = _as_int(offset)
        if first is None or not 0 <= first <= n_k - n_q:
            raise ValueError(
                f"attend: offset = {short_repr(offset)} must be a whole number from 0 to {n_k - n_q}, so that {n_q} queries "
                f"from there on are among {n_k} keys"
            )
        end = first + n_q
    if documents is None:
        lengths: list[int] = []
    elif isinstance(documents, Tensor):
        lengths = _lengths_of_runs(documents, k.shape[0], n_k, end)
    else:
        lengths = _first_lengths(documents, n_k, end)
    return (k, v, lengths) if end == n_k else (k[:, :, :end], v[:, :, :end], lengths)


def _as_int(value: object) -> int | None:
    """Returns a whole number, also one of NumPy, as int; None for other values."""
    if isinstance(value, int | torch.SymInt):  # Not converted: under torch.compile it may be symbolic.
        return None if isinstance(value, bool) else value  # type: ignore[return-value]  # A SymInt takes an int's place.
    return int(value) if isinstance(value, Integral) else None


def _first_lengths(documents: Sequence[int], n: int, end: int) -> list[int]:
    """Returns the lengths of documents, cut at `end`."""
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        is_array = hasattr(documents, "__array__")
        fix = "; give documents.tolist() for lengths, or torch.from_numpy(documents)" if is_array else ""
        raise ValueError(
            "attend: documents must be a sequence of lengths or an integer tensor [batch, n], got "
            f"{short_repr(documents)}{fix}"
        )
    total, lengths = 0, []
    for index, given in enumerate(documents):
        length = _as_int(given)
        if length is None or length < 1:
            bounds = index == 0 and given == 0 and documents[-1] == n
            raise ValueError(
                f"attend: documents[{index}] must be a length, a whole number of at least 1, got {short_repr(given)}"
                + ("; boundaries such as cu_seqlens are not lengths, give their differences" if bounds else "")
            )
        if total < end:
            lengths.append(min(length, end - total))
        total += length
    if total != n:
        raise ValueError(f"attend: documents add up to {total} positions, but k has {n}; give lengths that add up to {n}")
    return lengths if len(lengths) > 1 else []


def _lengths_of_runs(documents: Tensor, batch: int, n: int, end: int) -> list[int]:
    """Returns the lengths of runs of equal numbers, cut at `end`: of one row if all are alike, else of each row."""
    integers = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
    if documents.shape != (batch, n) or documents.dtype not in integers:
        fix = "; give documents.tolist() for lengths" if documents.dim() == 1 and documents.dtype in integers else ""
        raise ValueError(
            f"attend: documents must be an integer tensor {[batch, n]}, got {documents.dtype} {list(documents.shape)}{fix}"
        )
    if documents.layout != torch.strided or documents.is_meta:
        kind = "on the meta device, without values" if documents.is_meta else documents.layout
        raise ValueError(f"attend: documents is a tensor {kind}; give a dense one with values, or a sequence of lengths")
    if torch.compiler.is_compiling() or type(documents) not in (Tensor, Parameter) or is_wrapped(documents):
        raise NotImplementedError(
            "attend: documents = a tensor is read by the host, which torch.compile and torch.func do not allow; "
            "give a sequence of lengths"
        )
    starts = torch.ones(batch, end, dtype=torch.bool, device=documents.device)
    starts[:, 1:] = documents[:, 1:end] != documents[:, : end - 1]
    if bool((starts == starts[:1]).all()):
        starts = starts[:1]
    ends = [*starts.flatten().nonzero().flatten().tolist(), starts.numel()]
    lengths = [b - a for a, b in pairwise(ends)]
    return lengths if len(lengths) > 1 else []
