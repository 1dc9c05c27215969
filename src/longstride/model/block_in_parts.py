"""Residual blocks that keep only the first one's input, for long sequences: some rows, or some heads, at a time.

Whole tensors are the input, its gradient, the output of attention and its gradient; queries, keys and values, and their
gradients, exist for a group of heads at a time. All else exists for some rows, such that the inner layer of the feed-forward
network has BLOCK_PART_BYTES, or for a sixteenth of all rows. The gradients of weights are thus sums over parts, and those of
the input over groups of heads: they differ in the last bits from those of plain autograd. The number of parts and of groups
follows from the shapes alone.

Shapes: h [batch, n, width]; q, k, v [batch, heads of the group, n, d].
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstride.attention.api import attend_backward, attend_forward
from longstride.model import feed_forward
from longstride.model.dropout import draw_mask
from longstride.model.host_inputs import HostInputs
from longstride.model.layers import LAYERS, check_plain, drop
from longstride.model.residual import ops

GROUP_BYTES = 2**30
"""Bytes of the queries, keys and values that exist at a time."""
BLOCK_PART_BYTES = 2**27
"""Bytes of the inner layer of a part: short kernels would wait for the host."""
MOST_PARTS = 16
"""Longer sequences have larger parts instead; temporary tensors of attention take more than these."""
RowStats = tuple[Tensor, Tensor]
"""Mean and scale of each row; an RMS norm's mean is empty."""
QueryKeyValue = tuple[Tensor, Tensor, Tensor]
Rows = Any
"""An index of some rows of h."""


def blocks_in_parts(
    blocks: Sequence[Any], h: Tensor, seeds: Sequence[Tensor | None], rotation: Tensor | None, host: HostInputs | None
) -> Tensor:  # fmt: skip
    """Returns the result of ResidualBlocks, one after another. `host`: where to keep h; None: on the device.

    Only h is kept. The backward pass computes the inputs of the other blocks again, and overwrites the gradient of the
    result with that of h, to save memory.
    """
    for block in blocks:
        check_plain("recompute in parts", block, 'give recompute="on"')
    parameters = [x for block in blocks for x in block.parameters()]
    known = set(map(id, parameters))  # torch.compile would compare parameters themselves by their values.
    if any(x.requires_grad and id(x) not in known for block in blocks for x in _weights(block)):
        raise ValueError(
            "recompute in parts: a block's weight is none of its parameters, as with a parametrization or in a replica of "
            'nn.DataParallel, so it would get no gradient; give recompute="on"'
        )
    return _BlocksInParts.apply(h, blocks, seeds, rotation, host, *parameters)


def _weights(block: Any) -> list[Tensor]:
    """Returns the weights that `BlockParts` reads."""
    layers = [layer for name, layer in block.named_modules() if name.rpartition(".")[2] in LAYERS]
    read = [block.attention.query_scale, *(x for layer in layers for x in (layer.weight, layer.bias))]
    return [x for x in read if x is not None]


def group_count(heads: int, qkv_bytes: int) -> int:
    """Returns the number of groups of heads, a divisor of `heads`. `qkv_bytes`: queries, keys and values of all heads."""
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return next((count for count in divisors if qkv_bytes <= GROUP_BYTES * count), heads)


def block_part_count(inner_bytes: int) -> int:
    """Returns the number of parts. `inner_bytes`: of the inner layer, all rows."""
    return max(1, min(MOST_PARTS, -(-inner_bytes // BLOCK_PART_BYTES)))


class _BlocksInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, blocks: Sequence[Any], seeds: Sequence[Tensor | None], rotation: Tensor | None,
        host: HostInputs | None, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.blocks, ctx.seeds, ctx.rotation = blocks, seeds, rotation
        ctx.stored = None if host is None else host.store(h)
        ctx.save_for_backward(*([h] if host is None else []))
        h = h.detach()
        for block, own_seeds in zip(blocks, seeds):
            h = BlockParts(block, h, own_seeds, rotation).forward()
        return h

    @staticmethod
    def backward(ctx: Any, d_h: Tensor) -> Any:
        inputs = [ctx.saved_tensors[0] if ctx.stored is None else ctx.stored.fetch()]
        for block, seeds in zip(ctx.blocks[:-1], ctx.seeds):
            inputs.append(BlockParts(block, inputs[-1], seeds, ctx.rotation).forward())
        # Sums and expanded tensors share memory between positions.
        d_h = d_h if d_h.is_contiguous() else d_h.contiguous()
        gradients: dict[Tensor, Tensor] = {}
        for block, seeds in zip(reversed(ctx.blocks), reversed(ctx.seeds)):
            parts = BlockParts(block, inputs.pop(), seeds, ctx.rotation)
            parts.backward(d_h)
            gradients |= parts.gradients
        return d_h, None, None, None, None, *(gradients.get(x) for block in ctx.blocks for x in block.parameters())


class BlockParts:
    """The computation of a block in parts, forward or backward, without autograd but for what splits heads.

    What lies between products is that of `residual.py`: one operator each way, which on a GPU is one kernel.
    """

    def __init__(self, block: Any, h: Tensor, seeds: Tensor | None, rotation: Tensor | None) -> None:
        self.block, self.h, self.rotation = block, h, rotation
        inner_bytes = h.element_size() * h.numel() // h.shape[-1] * block.ff.inner.out_features
        self.rows = feed_forward.row_parts(h, block_part_count(inner_bytes))
        self.gelu_in_products = feed_forward.is_fused(h.device, h.dtype, block.ff.inner)
        self.scale = 1 / (1 - block.dropout)
        self.masks = None if seeds is None else [draw_mask(h, block.dropout, seed) for seed in seeds]
        attention = block.attention
        size = h.element_size() * h.numel() // h.shape[-1] * sum(attention.sizes)
        self.groups = _groups(attention.heads, group_count(attention.heads, size))
        self.casts: dict[Tensor, Tensor] = {}
        """Weights in the dtype of h."""
        self.gradients: dict[Tensor, Tensor] = {}
        """Sums of the gradients of parameters."""

    def forward(self) -> Tensor:
        """Returns the result of the block."""
        result, ff = self._attend()[0], self.block.ff
        for rows in self.rows:  # The result takes the memory of the output of attention.
            s, x, _ = self._add_attention(result[rows], rows)
            product = self._product(self._activate(x, False)[0], ff.outer)
            result[rows] = ops.add(s, *self._drop(product, ff.outer.bias, 1, rows), None, 1.0)
        return result

    def backward(self, d_h: Tensor) -> None:
        """Turns d_h, the gradient of the block's result, into that of its input, in place, and sums those of the weights."""
        output, kept = self._attend(keep=True)
        d_output = torch.empty_like(output)
        for rows in self.rows:
            d_h[rows], d_output[rows] = self._backward_rows(d_h[rows], output[rows], rows)
        self.masks = None
        for group in self.groups:
            qkv, stats = kept.pop(0)
            if qkv is None:
                qkv = self._project(group)
            results = self._columns(output, group), stats
            d_qkv = attend_backward(self._columns(d_output, group), *qkv, results, self.block.attention.patterns[group])
            del qkv, stats, results
            self._project_backward(group, d_qkv, d_h)
            del d_qkv

    def _backward_rows(self, d_result: Tensor, output: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Returns the gradients of H and of attention's output, for some rows, from that of (H + a(H)) + b(H)."""
        ff, project, norm = self.block.ff, self.block.attention.project, self.block.norm_ff
        s, x, stats = self._add_attention(output, rows)
        activation, before = self._activate(x, True)
        d_b = drop(d_result, self._mask(1, rows), self.scale)
        self._add_linear(ff.outer, d_b, activation)
        weight, bias = self._cast(ff.outer.weight), ff.inner.bias
        if self.gelu_in_products:
            d_inner, d_bias = ops.product_gelu_backward(d_b, weight, before, bias is not None)
        else:
            d_inner, d_bias = ops.bias_gelu_backward(d_b @ weight, before, bias)
        self._add_linear(ff.inner, d_inner, x, d_bias)
        d_s = self._add_norm_gradient(norm, d_result, d_inner @ self._cast(ff.inner.weight), s, stats)
        d_a = drop(d_s, self._mask(0, rows), self.scale)
        self._add_linear(project, d_a, output)
        return d_s, d_a @ self._cast(project.weight)

    def _activate(self, x: Tensor, need_slope: bool) -> tuple[Tensor, Tensor]:
        """Returns gelu(inner(x)), and what its gradient needs: the slope if it comes with the product, else the product."""
        inner = self.block.ff.inner
        if self.gelu_in_products:
            activation, slope = ops.product_gelu(x, self._cast(inner.weight), inner.bias, need_slope)
            return activation, slope
        product = self._product(x, inner)
        return ops.bias_gelu(product, inner.bias), product

    def _add_attention(self, output: Tensor, rows: Rows) -> tuple[Tensor, Tensor, RowStats]:
        """Returns H + a(H) of some rows, its norm, and each row's mean and scale. `output`: of attention."""
        project = self.block.attention.project
        branch = self._drop(self._product(output, project), project.bias, 0, rows)
        return self._add_norm(self.block.norm_ff, self.h[rows], *branch)

    def _add_norm(
        self, norm: nn.Module, stream: Tensor, branch: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RowStats]:
        """Returns stream + branch + bias, its norm, and each row's mean and scale."""
        added, x, *stats = ops.add_norm(stream, branch, bias, norm.weight, norm.bias, None, 1.0, norm.eps)
        return stream if branch is None else added, x, (stats[0], stats[1])

    def _add_norm_gradient(
        self, norm: nn.Module, d_stream: Tensor, d_x: Tensor, stream: Tensor, stats: RowStats
    ) -> Tensor:  # fmt: skip
        """Returns the gradient of the stream, d_stream and that through its norm, and sums those of the norm."""
        d_sum, _, sums = ops.add_norm_backward(d_stream, d_x, stream, norm.weight, *stats, None, 1.0, False)
        if isinstance(norm, nn.LayerNorm):
            self._add(norm.weight, sums[0])
            self._add(norm.bias, sums[1])
        return torch.as_tensor(d_sum)

    def _drop(
        self, value: Tensor, bias: Tensor | None, which: int, rows: Rows
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns a branch and the bias that is still to be added to it: with dropout none."""
        mask = self._mask(which, rows)
        if mask is None:
            return value, bias
        return drop(value if bias is None else value + bias.to(value.dtype), mask, self.scale), None

    def _mask(self, which: int, rows: Rows) -> Tensor | None:
        return None if self.masks is None else self.masks[which][rows]

    def _product(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The result of a linear layer without its bias."""
        return F.linear(x, self._cast(linear.weight))

    def _cast(self, weight: Tensor) -> Tensor:
        if weight not in self.casts:
            self.casts[weight] = weight.detach().to(self.h.dtype)
        return self.casts[weight]

    def _add_linear(self, linear: nn.Linear, d_result: Tensor, x: Tensor, d_bias: Tensor | None = None) -> None:
        """Adds the gradients of a linear layer. `d_bias`: that of the bias, if it is known."""
        d_weight, row_sum = ops.linear_backward(d_result, x, linear.bias is not None and d_bias is None)
        self._add(linear.weight, d_weight)
        if linear.bias is not None:
            self._add(linear.bias, row_sum if d_bias is None else d_bias)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter in self.gradients:
            self.gradients[parameter] += gradient
        else:
            self.gradients[parameter] = gradient.to(parameter.dtype)

    def _attend(self, keep: bool = False) -> tuple[Tensor, list[tuple[QueryKeyValue | None, Tensor]]]:
        """Returns the output of attention, and for each group of heads q, k and v, if it is the only one, and row stats."""
        alone = len(self.groups) == 1
        whole: Tensor | None = None
        kept: list[tuple[QueryKeyValue | None, Tensor]] = []
        for group in self.groups:
            qkv = self._project(group)
            output, stats = attend_forward(*qkv, self.block.attention.patterns[group])
            if alone:
                whole = output.transpose(1, 2).flatten(2)
            else:
                whole = torch.empty_like(self.h) if whole is None else whole
                self._columns(whole, group).copy_(output)
            if keep:
                kept.append((qkv if alone else None, stats))
            del qkv, output
        assert whole is not None
        return whole, kept

    def _project(self, group: slice) -> QueryKeyValue:
        """Returns the queries, keys and values of a group of heads."""
        attention = self.block.attention
        weight, bias = self._projection(group)
        count = group.stop - group.start
        whole = [self.h.new_empty(*self.h.shape[:2], count, size // attention.heads) for size in attention.sizes]
        for rows in self.rows:
            projected = F.linear(self._add_norm(self.block.norm_attention, self.h[rows])[1], weight, bias)
            for tensor, part in zip(whole, attention.split(projected, self._rotation(rows), group)):
                tensor[:, rows[1]] = part.transpose(1, 2)
        q, k, v = (tensor.transpose(1, 2) for tensor in whole)
        return q, k, v

    def _project_backward(self, group: slice, d_qkv: tuple[Tensor, ...], d_h: Tensor) -> None:
        """Adds to d_h the gradient through the projections of a group of heads."""
        attention, norm = self.block.attention, self.block.norm_attention
        layer, scale = attention.query_key_value, attention.query_scale
        weight, bias = self._projection(group)
        d_weight = torch.zeros_like(weight, dtype=layer.weight.dtype)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=layer.weight.dtype)
        for rows in self.rows:
            h, x, stats = self._add_norm(norm, self.h[rows])
            # Only normalised queries and keys need their values for the gradient.
            projected = x.new_empty(*x.shape[:-1], len(weight)) if scale is None else F.linear(x, weight, bias)
            with torch.enable_grad():
                projected.requires_grad_()
                qkv = attention.split(projected, self._rotation(rows), group)
            of = [projected] if scale is None or not scale.requires_grad else [projected, scale]
            d_projected, *d_scale = torch.autograd.grad(qkv, of, [part[:, :, rows[1]] for part in d_qkv])
            if scale is not None and d_scale:
                self._add(scale, *d_scale)
            weight_part, bias_part = ops.linear_backward(d_projected, x, d_bias is not None)
            d_weight += weight_part
            if d_bias is not None:
                d_bias += bias_part
            d_h[rows] = self._add_norm_gradient(norm, d_h[rows], d_projected @ weight, h, stats)
        for parameter, total in ((layer.weight, d_weight), (layer.bias, d_bias)):
            if total is not None:
                whole = self.gradients.setdefault(parameter, torch.zeros_like(parameter))
                for target, source in zip(self._rows_of(whole, group), total.split(self._sizes(group))):
                    target.copy_(source)

    def _projection(self, group: slice) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias, in the dtype of h, that make the queries, keys and values of a group of heads."""
        layer = self.block.attention.query_key_value
        weight = torch.cat(self._rows_of(layer.weight.detach(), group)).to(self.h.dtype)
        bias = None if layer.bias is None else torch.cat(self._rows_of(layer.bias.detach(), group)).to(self.h.dtype)
        return weight, bias

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


def _groups(heads: int, count: int) -> list[slice]:
    each = heads // count
    return [slice(first, first + each) for first in range(0, heads, each)]
