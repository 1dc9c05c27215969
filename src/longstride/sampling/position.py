"""One position of a network in few calls of PyTorch: for decoding, where a call costs more than its arithmetic.

Activations are [rows, width]: a row for each stream, and some for padding. A CPU rounds products of few rows differently by
their number, and a sample should not depend on the number of streams.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.config import BYTES
from longstride.model.layers import EPSILON, QK_FACTOR, SLOPE
from longstride.model.transformer import ResidualBlock

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Queries [batch * heads, 1, d], keys and values [batch, heads, d], and the result [batch * heads, 1, d_v] to be written."""
PACKED_NETWORK, PACKED_MATRIX = 2**21, 2**16
"""The fewest weights of a network, and of its matrix, that are packed. Smaller ones stay in a core's cache, and a call of
oneDNN or FBGEMM costs more than it saves. For FBGEMM the network may be smaller."""
ROUNDING = 2.0**-25
"""Of float32, relative: about what a weight loses by it on average."""
Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with their signs, of a head's numbers: [d], or [batch, 1, d] for streams at positions of their own."""


class RootMeanSquareNorm:
    """x -> factor * x / sqrt(mean(x^2) + epsilon) over the last dimension, in fewer calls than PyTorch's own takes."""

    def __init__(self, size: int, device: torch.device, factor: Tensor | None = None) -> None:
        """`factor`: a number for each row."""
        self.share, self.epsilon, self.factor = 1 / size, torch.tensor(EPSILON, device=device), factor

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=self.share).rsqrt_()
        return x * (scale if self.factor is None else scale.mul_(self.factor))


class Norm:
    """A norm without gradients."""

    def __init__(self, norm: nn.Module, width: int, device: torch.device) -> None:
        self.shape, self.rms_norm = (width,), RootMeanSquareNorm(width, device)
        self.affine = (norm.weight, norm.bias) if isinstance(norm, nn.LayerNorm) else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.rms_norm(x) if self.affine is None else torch.layer_norm(x, self.shape, *self.affine, EPSILON)


class Product:
    """A linear layer without gradients: x -> factor * (x W + b)."""

    least_rows: int | None = None
    """Rows from which on a row of a result does not depend on their number; None: it depends on the threads."""

    def __init__(self, layer: nn.Linear, factor: float = 1.0) -> None:
        self.weight, self.has_bias = layer.weight.detach().t(), layer.bias is not None
        if self.weight.device.type == "cpu":
            self.weight = self.weight.contiguous()  # A product of few rows takes an eighth less time.
        self.bias = layer.bias.detach() if self.has_bias else layer.weight.new_zeros(1)
        self.alpha, self.beta = factor, factor if self.has_bias else 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight, beta=self.beta, alpha=self.alpha)

    def add_to(self, h: Tensor, x: Tensor) -> None:
        """Adds factor * x W + b."""
        h.addmm_(x, self.weight, alpha=self.alpha)
        if self.has_bias:
            h += self.bias


class PackedProduct(Product):
    """The same on a CPU, with weights that oneDNN has packed: they are read once, in the order of its loops.

    A row of a result does not depend on the number of rows, from two rows on.
    """

    least_rows: int | None = 2

    def __init__(self, layer: nn.Linear, factor: float = 1.0) -> None:
        super().__init__(layer, factor)
        del self.weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(factor * layer.weight.detach(), None)
        self.packed_bias = self.beta * self.bias if self.has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.packed_bias, "none", [], "")

    def add_to(self, h: Tensor, x: Tensor) -> None:
        h += torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        if self.has_bias:
            h += self.bias


class HalfProduct(Product):
    """The same on a CPU, with weights that FBGEMM has packed as float16. Activations and sums stay float32.

    A step takes the time to read the weights, and these are half as many bytes. A row of a result does not depend on the
    number of rows.
    """

    least_rows: int | None = 1

    def __init__(self, layer: nn.Linear, factor: float = 1.0) -> None:
        super().__init__(layer, factor)
        del self.weight
        weight, scale = layer.weight.detach(), half_scale(layer.weight)
        self.packed = torch.ops.quantized.linear_prepack_fp16(scale * weight, None)
        self.alpha = factor / scale
        self.factor, self.scaled_bias = torch.tensor(self.alpha), factor * self.bias

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        result *= self.factor
        return result.add_(self.scaled_bias) if self.has_bias else result

    def add_to(self, h: Tensor, x: Tensor) -> None:
        h.add_(torch.ops.quantized.linear_dynamic_fp16(x, self.packed), alpha=self.alpha)
        if self.has_bias:
            h += self.bias


def can_halve(device: torch.device) -> bool:
    """Whether PyTorch has FBGEMM, for a CPU that it knows."""
    return device.type == "cpu" and torch.backends.quantized.engine in ("x86", "fbgemm")


def half_scale(weight: Tensor) -> float:
    """Returns the power of two that brings the largest weight close to the end of float16's range."""
    return 2.0 ** (15 - int(torch.frexp(weight.detach().abs().max()).exponent))


def fits_half(weight: Tensor) -> bool:
    """Whether float16 holds the scaled weights of each output with no more error than float32 would. It holds those of a
    model in half precision."""
    scaled = half_scale(weight) * weight.detach()
    return bool(((scaled.half().float() - scaled).norm(dim=1) <= ROUNDING * scaled.norm(dim=1)).all())


def can_pack(device: torch.device) -> bool:
    """Whether PyTorch has oneDNN, and the operators that torch.compile calls it by."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, x) for x in names)


class Products:
    """The products of a network's layers. Their copies of the weights serve any number of streams."""

    def __init__(self, model: SparseTransformer) -> None:
        device = model.output.weight.device
        packs = model.config.parameters >= PACKED_NETWORK and can_pack(device)
        halves = can_halve(device)
        self.classes: dict[nn.Linear, type[Product]] = {}
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                is_large = layer.weight.numel() >= PACKED_MATRIX
                is_half = is_large and halves and fits_half(layer.weight)
                self.classes[layer] = HalfProduct if is_half else PackedProduct if is_large and packs else Product
        least = [kind.least_rows for kind in self.classes.values()]
        self.least_rows = None if None in least else max(rows for rows in least if rows)
        """Rows from which on a row of any product does not depend on their number; None: it depends on the threads."""
        self.made: dict[nn.Linear, Product] = {}

    def of(self, layer: nn.Linear, factor: float = 1.0) -> Product:
        if layer not in self.made:
            self.made[layer] = self.classes[layer](layer, factor)
        return self.made[layer]


class BlockPosition:
    """A residual block at one position of all streams."""

    def __init__(self, block: ResidualBlock, config: ModelConfig, batch: int, rows: int, products: Products) -> None:
        self.batch, self.heads, self.qk_width = batch, config.heads, config.qk_width
        attention, device = block.attention, block.attention.project.weight.device
        self.norm_attention, self.norm_ff = (
            Norm(one, config.width, device) for one in (block.norm_attention, block.norm_ff)
        )
        self.query_key_value, self.project = products.of(attention.query_key_value), products.of(attention.project)
        # gelu(x) = x sigmoid(s x) = silu(s x) / s, and the products multiply by s and 1 / s at no cost.
        self.inner, self.outer = products.of(block.ff.inner, SLOPE), products.of(block.ff.outer, 1 / SLOPE)
        self.norm_qk: RootMeanSquareNorm | None = None
        if attention.query_scale is not None:
            scale = attention.query_scale.detach()
            factor = torch.cat([QK_FACTOR * scale, torch.ones_like(scale)])[:, None]  # of queries, then of keys
            self.norm_qk = RootMeanSquareNorm(config.qk_width // config.heads, device, factor)
        self.attended = torch.zeros(rows, config.width, device=device)
        self.out = self.attended[:batch].view(batch * config.heads, 1, -1)

    def advance(self, h: Tensor, attend: Attend, rotation: Rotation | None) -> None:
        """Adds the block's output to h, [rows, width]."""
        batch, heads, sizes = self.batch, self.heads, 2 * self.qk_width
        packed = self.query_key_value(self.norm_attention(h))[:batch]
        qk, v = packed[:, :sizes].view(batch, 2 * heads, -1), packed[:, sizes:].view(batch, heads, -1)
        if self.norm_qk is not None:
            qk = self.norm_qk(qk)
        if rotation is not None:
            cos, sin = rotation
            qk = torch.addcmul(qk * cos, qk.roll(qk.shape[2] // 2, 2), sin)
        attend(qk[:, :heads].reshape(batch * heads, 1, -1), qk[:, heads:], v, self.out)
        self.project.add_to(h, self.attended)
        self.outer.add_to(h, F.silu(self.inner(self.norm_ff(h)), inplace=True))


class NetworkPosition:
    """A network at one position of all streams."""

    def __init__(self, model: SparseTransformer, batch: int, rows: int, products: Products | None = None) -> None:
        """`model`: with float32 activations. `rows`: at least `batch`. `products`: of the model, to be shared."""
        embedding, config = model.embedding, model.config
        self.model, self.batch = model, batch
        self.device = embedding.start.device
        products = products or Products(model)
        self.blocks = [BlockPosition(block, config, batch, rows, products) for block in model.blocks]  # type: ignore[arg-type]
        self.norm, self.output = Norm(model.norm, config.width, self.device), products.of(model.output)
        self.norm_embedding = RootMeanSquareNorm(config.width, self.device) if embedding.normalized else None
        self.start = embedding.start.detach().expand(batch, -1)
        self.offsets = BYTES * torch.arange(config.last_bytes, device=self.device).flip(0)
        """The first row of each table, that of the last byte at the end."""
        self.h = torch.zeros(rows, config.width, device=self.device)
        self.streams, self.padding = self.h[:batch], self.h[batch:]
        self.ahead = range(0)

    @cached_property
    def tables(self) -> Tensor:
        """Embeddings of the last byte, then of those before it."""
        return byte_tables(self.model)

    def look_ahead(self, positions: range) -> None:
        """Makes the tables of what depends on the position alone, for these positions."""
        self.learned, self.rotations = position_tables(self.model, positions)
        self.ahead = positions

    def step(self, tokens: Tensor | None, position: int, attends: Sequence[Attend]) -> Tensor:
        """Returns the logits [batch, 256] at a position of `ahead`.

        tokens: the bytes before it, [batch, m], the newest last; m is `last_bytes`, or `position` if that is less; None
        before the first. attends: of each block.
        """
        here = position - self.ahead.start
        before = self.start if tokens is None else self._embed(tokens)
        return self.advance(before, self.learned[here], self.rotations[here], attends)

    def advance(self, before: Tensor, learned: Tensor, rotation: Rotation | None, attends: Sequence[Attend]) -> Tensor:
        """Returns the logits [batch, 256] after embedded bytes, [batch, width]. learned, rotation: as `position_tables` has
        them, for all streams or for each."""
        h = self.h
        torch.add(before, learned, out=self.streams)
        if self.norm_embedding is None:
            self.padding.zero_()  # Blocks add to it.
        else:
            h = self.norm_embedding(h)
        for block, attend in zip(self.blocks, attends):
            block.advance(h, attend, rotation)
        return self.output(self.norm(h))[: self.batch]

    def _embed(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(self.offsets[-tokens.shape[1] :] + tokens, self.tables)  # [batch, m, width]
        return rows.sum(1) if rows.shape[1] > 1 else rows[:, 0]


def byte_tables(model: SparseTransformer) -> Tensor:
    """Returns the embeddings of the last byte, then of those before it: [256 * last_bytes, width]."""
    earlier = (table.weight for table in model.embedding.earlier if isinstance(table, nn.Embedding))
    return torch.cat([model.embedding.token.weight, *earlier]).detach()


def position_tables(model: SparseTransformer, positions: range) -> tuple[Sequence[Tensor], list[Rotation | None]]:
    """Returns what depends on the position alone: the embedding of each position, [width] or [1], and its rotation."""
    embedding = model.embedding
    position = torch.arange(positions.start, positions.stop, device=embedding.start.device)
    learned = torch.zeros(len(positions), 1, device=position.device)
    for name, index in zip(embedding.positions.names, embedding.positions.indices(position)):
        learned = learned + embedding.position[name](index)
    rotation = embedding.rotation(position)
    if rotation is None:
        return learned.detach().unbind(), [None] * len(positions)
    cos, sin = rotation
    return learned.detach().unbind(), list(zip(cos.repeat(1, 2).unbind(), torch.cat([-sin, sin], 1).unbind()))
