"""The oracle of grouped queries, offsets, documents and the lse: a softmax over an explicit mask; and cases for it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from longstride import attend
from longstride.patterns import Pattern
from tests.attention.error_rule import Ran, assert_errors_within_the_rule
from tests.strategies import patterns

NAMES = ("output", "lse", "dq", "dk", "dv")


def masks(heads: Sequence[Pattern], rows: Sequence[Sequence[int]], first: int, end: int) -> Tensor:
    """The pairs of queries [first, end), bool [rows, heads, queries, keys]. rows: of each, the lengths of its documents."""
    return torch.stack(
        [torch.stack([torch.block_diag(*map(head.mask, row)).bool()[first:end] for head in heads]) for row in rows]
    )


def oracle(
    q: Tensor, k: Tensor, v: Tensor, heads: Sequence[Pattern], offset: int, rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """The output and the lse."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    hidden = ~masks(heads, rows, offset, offset + q.shape[2]).to(q.device)
    nothing = hidden.all(-1, keepdim=True)
    scores = (q @ k.transpose(-1, -2) / q.shape[3] ** 0.5).masked_fill(hidden & ~nothing, -torch.inf)
    lse = scores.to(torch.promote_types(q.dtype, torch.float32)).logsumexp(-1).masked_fill(nothing.squeeze(-1), -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0) @ v, lse


def gradients(output: Tensor, lse: Tensor, inputs: Sequence[Tensor], of_lse: bool = True) -> list[Tensor]:
    """The output, the lse with 0 for -inf, and the gradients of q, k and v; the same slopes of both for the same shapes.

    of_lse: whether the lse has a slope; calls without it may run other kernels.
    """
    generator = torch.Generator().manual_seed(1)
    seen = lse.masked_fill(lse == -torch.inf, 0)
    sources = (output, seen)[: 1 + of_lse]
    slopes = [torch.randn(x.shape, generator=generator).to(x) for x in sources]
    return [output.detach(), seen.detach(), *torch.autograd.grad(sources, inputs, slopes)]


class Case(NamedTuple):
    """A call of attend: patterns of the heads, shapes, and options."""

    heads: list[Pattern]
    kv_heads: int
    batch: int
    n_q: int
    n_k: int
    d_qk: int
    d_v: int
    options: dict[str, Any]

    def tensors(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        torch.manual_seed(0)
        q = torch.randn(self.batch, len(self.heads), self.n_q, self.d_qk)
        k, v = (torch.randn(self.batch, self.kv_heads, self.n_k, d) for d in (self.d_qk, self.d_v))
        return [x.to(device, dtype).requires_grad_() for x in (q, k, v)]

    @property
    def offset(self) -> int:
        given = self.options.get("offset")
        return self.n_k - self.n_q if given is None else given

    @property
    def rows(self) -> list[list[int]]:
        """Of each row, the lengths of its documents."""
        documents = self.options.get("documents")
        if documents is None:
            return [[self.n_k]] * self.batch
        if isinstance(documents, Tensor):
            return [row.unique_consecutive(return_counts=True)[1].tolist() for row in documents]
        return [list(documents)] * self.batch

    def check(
        self, impl: str, dtype: torch.dtype = torch.float32, device: str = "cpu", of_lse: bool = True, apart: bool = False
    ) -> None:  # fmt: skip
        """Compares output, lse and all gradients with the oracle. of_lse: as in `gradients`; apart: the inputs are
        [batch, n, heads, d] in memory."""
        inputs = self.tensors(dtype, device)
        if apart:
            inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
        with Ran() as ran:
            ours = gradients(*attend(*inputs, self.heads, impl=impl, return_lse=True, **self.options), inputs, of_lse)
        if impl != "reference":
            assert {f"longstride.{impl}_forward", f"longstride.{impl}_backward"} <= set(ran.ops)
        plain = gradients(*oracle(*inputs, self.heads, self.offset, self.rows), inputs, of_lse)
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        exact = gradients(*oracle(*doubles, self.heads, self.offset, self.rows), doubles, of_lse)
        assert_errors_within_the_rule(NAMES, ours, plain, exact)

    def check_isolation(
        self, impl: str, dtype: torch.dtype, device: str, parts: Sequence[tuple[int, int]], future: int, huge: float
    ) -> None:
        """Not one bit of a part [start, end) depends on the rest of the row, NaN included; nor one before `future` on huge
        values from there on."""
        inputs = [x.detach() for x in self.tensors(dtype, device)]
        slopes = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3], device=device, dtype=dtype)

        def results(*changed: Tensor) -> list[Tensor]:
            leaves = [x.clone().requires_grad_() for x in changed]
            output, lse = attend(*leaves, self.heads, impl=impl, return_lse=True, **self.options)
            return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, slopes)]

        before = results(*inputs)
        for start, end in parts:
            other = [torch.full_like(x, torch.nan) for x in inputs]
            for x, y in zip(other, inputs):
                x[:, :, start:end] = y[:, :, start:end]
            for ours, theirs in zip(results(*other), before):
                assert torch.equal(ours[:, :, start:end], theirs[:, :, start:end])
        later = [x.clone() for x in inputs]
        for x in later:
            x[:, :, future:] = huge
        for ours, theirs in zip(results(*later)[:2], before):
            assert torch.equal(ours[:, :, :future], theirs[:, :, :future])


@st.composite
def cases(draw: st.DrawFn, longest_n: int = 60, longest_stride: int = 16) -> Case:
    kv_heads, group, batch = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    n_k = draw(st.integers(1, longest_n))
    n_q = draw(st.one_of(st.just(n_k), st.just(1), st.integers(1, n_k)))
    one, heads = patterns(longest_stride), kv_heads * group
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["offset"] = draw(st.integers(0, n_k - n_q))
    kind = draw(st.sampled_from(["none", "lengths", "equal", "numbers"]))
    if kind == "lengths":
        cuts = sorted(draw(st.sets(st.integers(1, n_k - 1), max_size=6))) if n_k > 1 else []
        options["documents"] = [b - a for a, b in pairwise([0, *cuts, n_k])]
    elif kind == "equal":
        count = draw(st.sampled_from([count for count in range(1, 7) if n_k % count == 0]))
        options["documents"] = [n_k // count] * count
    elif kind == "numbers":
        starts = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=batch * n_k, max_size=batch * n_k))
        options["documents"] = torch.tensor(starts).view(batch, n_k).cumsum(1) % 3
    return Case(
        [draw(one)] * heads if draw(st.booleans()) else [draw(one) for _ in range(heads)],
        kv_heads,
        batch,
        n_q,
        n_k,
        draw(st.integers(1, 6)),
        draw(st.integers(1, 6)),
        options,
    )
