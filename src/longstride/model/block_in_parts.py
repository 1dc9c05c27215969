"""A residual block that keeps only its input, for long sequences: both passes compute some rows, or some heads, at a time.

Whole tensors are the input, its gradient, the output of attention and its gradient; queries, keys and values, and their
gradients, exist for a group of heads at a time. All else exists for some rows, such that the inner layer of the feed-forward
network has PART_BYTES. The gradients of weights are thus sums over parts, and those of the input over groups of heads: they
differ in the last bits from those of plain autograd. The number of parts and of groups follows from the shapes alone.

Shapes: h [batch, n, width]; q, k, v [batch, heads of the group, n, d].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstride.attention.api import attend_backward, attend_forward
from longstride.model.dropout import draw_mask
from longstride.model.host_inputs import HostInputs
from longstride.model.layers import drop, feed_forward_gradient, gelu, row_parts

GROUP_BYTES = 2**30
"""Bytes of the queries, keys and values that exist at a time."""
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
Rows = Any
"""An index of some rows of h."""


def block_in_parts(
    block: Any, h: Tensor, seeds: Tensor | None, rotation: Tensor | None, host: HostInputs | None
) -> Tensor:  # fmt: skip
    """Returns block(h) of a ResidualBlock. `host`: where to keep h; None: on the device.

    The backward pass overwrites the gradient of the result with that of h, to save memory.
    """
    return _BlockInParts.apply(h, block, seeds, rotation, host, *block.parameters())


def group_count(heads: int, qkv_bytes: int) -> int:
    """Returns the number of groups of heads, a divisor of `heads`. `qkv_bytes`: queries, keys and values of all heads."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return next((count for count in divisors if qkv_bytes <= GROUP_BYTES * count), heads)


class _BlockInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, block: Any, seeds: Tensor | None, rotation: Tensor | None, host: HostInputs | None,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.block, ctx.seeds, ctx.rotation = block, seeds, rotation
        ctx.stored = None if host is None else host.store(h)
        ctx.save_for_backward(*([h] if host is None else []))
        h = h.detach()
        parts = BlockParts(block, h, seeds, rotation)
        result = parts.attention_output()
        for rows in parts.rows:  # The result takes the memory of the output of attention.
            s, ff = parts.add_attention(h[rows], result[rows], rows), block.ff
            b = drop(ff.outer(gelu(ff.inner(block.norm_ff(s)))), parts.mask(1, rows), parts.scale)
            result[rows] = s + b
        return result

    @staticmethod
    def backward(ctx: Any, d_h: Tensor) -> Any:
        h = ctx.saved_tensors[0] if ctx.stored is None else ctx.stored.fetch()
        # Sums and expanded tensors share memory between positions.
        d_h = d_h if d_h.is_contiguous() else d_h.contiguous()
        parts = BlockParts(ctx.block, h, ctx.seeds, ctx.rotation)
        parts.backward(d_h)
        return d_h, None, None, None, None, *(parts.gradients.get(x) for x in ctx.block.parameters())


class BlockParts:
    """The computation of a block in parts, forward or backward."""

    def __init__(self, block: Any, h: Tensor, seeds: Tensor | None, rotation: Tensor | None) -> None:
        self.block, self.h, self.rotation = block, h, rotation
        self.rows = row_parts(h, block.ff.inner.out_features)
        self.scale = 1 / (1 - block.dropout)
        self.masks = None if seeds is None else [draw_mask(h, block.dropout, seed) for seed in seeds]
        attention = block.attention
        size = h.element_size() * h.numel() // h.shape[-1] * sum(attention.sizes)
        self.groups = _groups(attention.heads, group_count(attention.heads, size))
        self.gradients: dict[Tensor, Tensor] = {}
        """Sums of the gradients of parameters."""

    def mask(self, which: int, rows: Rows) -> Tensor | None:
        return None if self.masks is None else self.masks[which][rows]

    def attention_output(self) -> Tensor:
        """Returns the output of attention for all heads, [batch, n, width]."""
        return self._attend()[0]

    def add_attention(self, h: Tensor, output: Tensor, rows: Rows) -> Tensor:
        """Returns H + a(H) of some rows. `output`: of attention."""
        return h + drop(self.block.attention.project(output), self.mask(0, rows), self.scale)

    def backward(self, d_h: Tensor) -> None:
        """Turns d_h, the gradient of the block's result, into that of its input, in place, and sums those of the weights."""
        output, kept = self._attend(keep=True)
        d_output = torch.empty_like(output)
        block, ff = self.block, self.block.ff
        weights = [*block.attention.project.parameters(), *block.norm_ff.parameters(), *ff.parameters()]
        for rows in self.rows:
            with torch.enable_grad():
                inputs = self.h[rows].detach().requires_grad_(), output[rows].detach().requires_grad_()
                s = self.add_attention(*inputs, rows)
                b = feed_forward_gradient(block.norm_ff(s), ff.inner, ff.outer, self.mask(1, rows), self.scale)
            d_result = d_h[rows]
            d_h[rows], d_output[rows], *gradients = torch.autograd.grad((s, b), (*inputs, *weights), (d_result, d_result))
            self._add(weights, gradients)
        self.masks = None
        for group in self.groups:
            qkv, stats = kept.pop(0)
            if qkv is None:
                qkv = self._project(group)
            results = self._columns(output, group), *stats
            d_qkv = attend_backward(self._columns(d_output, group), *qkv, results, block.attention.patterns[group])
            del qkv, stats, results
            self._project_backward(group, d_qkv, d_h)
            del d_qkv

    def _attend(self, keep: bool = False) -> tuple[Tensor, list[tuple[QueryKeyValue | None, tuple[Tensor, ...]]]]:
        """Returns the output of attention, and for each group of heads q, k and v, if it is the only one, and row stats."""
        alone = len(self.groups) == 1
        whole: Tensor | None = None
        kept: list[tuple[QueryKeyValue | None, tuple[Tensor, ...]]] = []
        for group in self.groups:
            qkv = self._project(group)
            output, *stats = attend_forward(*qkv, self.block.attention.patterns[group])
            if alone:
                whole = output.transpose(1, 2).flatten(2)
            else:
                whole = torch.empty_like(self.h) if whole is None else whole
                self._columns(whole, group).copy_(output)
            if keep:
                kept.append((qkv if alone else None, tuple(stats)))
            del qkv, output
        assert whole is not None
        return whole, kept

    def _project(self, group: slice) -> QueryKeyValue:
        """Returns the queries, keys and values of a group of heads."""
        attention = self.block.attention
        weight, bias = self._projection(group)
        weight, bias = weight.to(self.h.dtype), None if bias is None else bias.to(self.h.dtype)
        count = group.stop - group.start
        whole = [self.h.new_empty(*self.h.shape[:2], count, size // attention.heads) for size in attention.sizes]
        for rows in self.rows:
            projected = F.linear(self.block.norm_attention(self.h[rows]), weight, bias)
            for tensor, part in zip(whole, attention.split(projected, self._rotation(rows), group)):
                tensor[:, rows[1]] = part.transpose(1, 2)
        q, k, v = (tensor.transpose(1, 2) for tensor in whole)
        return q, k, v

    def _project_backward(self, group: slice, d_qkv: tuple[Tensor, ...], d_h: Tensor) -> None:
        """Adds to d_h the gradient through the projections of a group of heads."""
        attention, norm = self.block.attention, self.block.norm_attention
        scale = attention.query_scale
        weight, bias = (None if x is None else x.requires_grad_() for x in self._projection(group))
        assert weight is not None
        norm_weights = list(norm.parameters())
        sliced = [weight] if bias is None else [weight, bias]
        others = norm_weights if scale is None else [*norm_weights, scale]
        sums = [torch.zeros_like(x) for x in sliced]
        # Only normalised queries and keys need their values for the gradient.
        project: Any = F.linear if scale is not None else _LinearGradient.apply
        for rows in self.rows:
            with torch.enable_grad():
                h = self.h[rows].detach().requires_grad_()
                projected = project(norm(h), weight.to(h.dtype), None if bias is None else bias.to(h.dtype))
                qkv = attention.split(projected, self._rotation(rows), group)
            d_rows = [x[:, :, rows[1]] for x in d_qkv]
            added, *gradients = torch.autograd.grad(qkv, (h, *sliced, *others), d_rows)
            d_h[rows] += added
            for total, gradient in zip(sums, gradients):
                total += gradient
            self._add(others, gradients[len(sliced) :])
        for parameter, total in zip(attention.query_key_value.parameters(), sums):
            whole = self.gradients.setdefault(parameter, torch.zeros_like(parameter))
            for target, source in zip(self._rows_of(whole, group), total.split(self._sizes(group))):
                target.copy_(source)

    def _projection(self, group: slice) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight and bias that make the queries, keys and values of a group of heads."""
        layer = self.block.attention.query_key_value
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        return torch.cat(self._rows_of(weight, group)), None if bias is None else torch.cat(self._rows_of(bias, group))

    def _sizes(self, group: slice) -> list[int]:
        attention = self.block.attention
        return [size // attention.heads * (group.stop - group.start) for size in attention.sizes]

    def _rows_of(self, weight: Tensor, group: slice) -> list[Tensor]:
        """Returns views of the rows for the queries, the keys and the values of a group of heads."""
        attention = self.block.attention
        each = [size // attention.heads for size in attention.sizes]
        return [
            part[group.start * size : group.stop * size] for part, size in zip(weight.split(list(attention.sizes)), each)
        ]

    def _columns(self, x: Tensor, group: slice) -> Tensor:
        """Returns a view [batch, heads of the group, n, d] of [batch, n, width]."""
        return x.unflatten(-1, (self.block.attention.heads, -1))[:, :, group].transpose(1, 2)

    def _rotation(self, rows: Rows) -> Tensor | None:
        return None if self.rotation is None else self.rotation[:, rows[1]]

    def _add(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients):
            if parameter in self.gradients:
                self.gradients[parameter] += gradient
            else:
                self.gradients[parameter] = gradient


class _LinearGradient(torch.autograd.Function):
    """F.linear without its value, which is replaced by zeros: for a gradient that does not need it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return x.new_zeros(()).expand(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = d_result.flatten(0, -2)
        return d_result @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.has_bias else None


def _groups(heads: int, count: int) -> list[slice]:
    each = heads // count
    return [slice(first, first + each) for first in range(0, heads, each)]
