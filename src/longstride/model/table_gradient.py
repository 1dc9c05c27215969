"""The gradients of embedding tables, with the same bits in every run, also on a GPU.

There PyTorch adds the rows of an index in an order that differs from run to run, if there are thousands of them. Here a
product with a one-hot matrix adds them, exact for each number and summed in float32:

    d_table [rows, width] = one_hot(index)^T [rows, n] d_output [n, width]

The tables of the last bytes share one product: their one-hot matrices lie side by side.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstride.model.layers import wide, wide_product

ONE_HOT_BYTES = 2**26
"""The most bytes of a one-hot matrix. More indices take several products."""
PIECES = 3
"""bfloat16 has 8 significant bits, and float32 has 24."""


def uses_products(weight: Tensor) -> bool:
    """Whether gradients are products. On a CPU PyTorch's sums have the same bits in every run, and take less time."""
    return weight.is_cuda and weight.requires_grad and weight.dtype == torch.float32 and torch.is_grad_enabled()


def lookup(weight: Tensor, index: Tensor, rounded: torch.dtype | None) -> Tensor:
    """Returns the rows [..., width] of the indices [...]. `rounded`: as for `Table`."""
    return _Lookup.apply(weight, index, rounded)


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, index: Tensor, rounded: torch.dtype | None) -> Tensor:
        return F.embedding(index, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, index, ctx.rounded = inputs
        ctx.rows = len(weight)
        ctx.save_for_backward(index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, None, None]:
        d_output = d_output if ctx.rounded is None else d_output.to(ctx.rounded)
        return sums_by_index(d_output.flatten(0, -2), ctx.saved_tensors[0].reshape(-1, 1), ctx.rows)[0], None, None


def embed_last_bytes(tokens: Tensor, start: Tensor, tables: Sequence[Tensor], rounded: torch.dtype | None) -> Tensor:
    """Returns the sum of a table's row for each of the last bytes [batch, n, width]. The first table is that of the nearest
    byte; before the first byte it gives the start vector, and others nothing. `rounded`: as for `lookup`."""
    return _LastBytes.apply(tokens, start, rounded, *tables)


class _LastBytes(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, start: Tensor, rounded: torch.dtype | None, *tables: Tensor) -> Tensor:
        batch, n = tokens.shape
        tokens = tokens.long()
        found = torch.cat([start.expand(batch, 1, -1), F.embedding(tokens[:, :-1], tables[0])], 1)
        for distance, table in enumerate(tables[1:n], 2):
            found = found + F.pad(F.embedding(tokens[:, :-distance], table), (0, 0, distance, 0))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens, _, ctx.rounded, *tables = inputs
        ctx.rows, ctx.tables = len(tables[0]), len(tables)
        ctx.save_for_backward(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens: Tensor = ctx.saved_tensors[0].long()
        d_output = d_output if ctx.rounded is None else d_output.to(ctx.rounded)
        n = tokens.shape[1]
        index = [
            F.pad(tokens[:, : max(0, n - distance)], (min(n, distance), 0), value=-1)
            for distance in range(1, ctx.tables + 1)
        ]
        sums = sums_by_index(d_output.flatten(0, 1), torch.stack(index, -1).flatten(0, 1), ctx.rows)
        return None, wide(d_output[:, 0]).sum(0), None, *sums


def sums_by_index(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Returns, for each column of the index [n, columns], the sums of those rows of x [n, width] that have the same index:
    float32 [columns, rows, width]. Index -1 stands for none."""
    columns = index.shape[1]
    total = x.new_zeros(columns * rows, x.shape[1], dtype=torch.float32)
    if not len(x):
        return total.unflatten(0, (columns, rows))
    numbers = torch.arange(rows, device=x.device)
    together = max(1, ONE_HOT_BYTES // (2 * columns * rows))
    for own, own_index in zip(x.split(together), index.split(together)):
        pieces = [own] if own.dtype != torch.float32 else _pieces(own)
        one_hot = (own_index[:, :, None] == numbers).flatten(1).to(pieces[0].dtype)
        side_by_side = torch.cat(pieces, 1) if len(pieces) > 1 else own
        sums = wide_product(one_hot.T, side_by_side)
        for part in sums.chunk(len(pieces), 1):
            total = total + part
    return total.unflatten(0, (columns, rows))


def _pieces(x: Tensor) -> list[Tensor]:
    """Returns tensors in bfloat16 that add up to x, float32. Products in float32 would be without tensor cores."""
    found: list[Tensor] = []
    for _ in range(PIECES):
        found.append(x.to(torch.bfloat16))
        x = x - found[-1]
    return found
