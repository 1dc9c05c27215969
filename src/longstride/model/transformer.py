"""The Sparse Transformer (sections 5.2 to 5.6): bytes -> embedding -> N residual blocks -> norm -> logits.

    H_0 = embed(X, W_e)                      a(H) = dropout(attention(norm(H)))
    H_k = H_(k-1) + resblock(H_(k-1))        b(H) = dropout(ff(norm(H + a(H))))
    y = softmax(norm(H_N) W_out)             resblock(H) = a(H) + b(H), added as (H + a(H)) + b(H)

Shapes: bytes [batch, n]; H [batch, n, width]; logits [batch, n, 256], where position t predicts byte t from those before.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longstride.model import feed_forward, pretrained, residual
from longstride.model.attention import Attend, Attention
from longstride.model.block_in_parts import blocks_in_parts
from longstride.model.casts import cast_together
from longstride.model.config import BYTES, ModelConfig
from longstride.model.cost import check_memory
from longstride.model.dropout import draw_mask, draw_seeds
from longstride.model.embedding import Embedding
from longstride.model.host_inputs import HostInputs, HostMemory
from longstride.model.initial_weights import initialise
from longstride.model.layers import Linear, Norm, RootMeanSquareNorm, has_hooks, is_plain
from longstride.model.loss import nats
from longstride.model.recompute import IN_PARTS, segment_slices
from longstride.model.residual import Branch, Dropout, Product, add, add_and_normalize, gelu, normalize, product

INTEGER_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


class FeedForward(nn.Module):
    """ff(x) = W_2 gelu(W_1 x + b_1) + b_2, and its addition to the stream with dropout."""

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.inner = Linear(config.width, config.ff_width, bias=config.norm == "layer")
        self.outer = Linear(config.ff_width, config.width, bias=config.norm == "layer")
        self.dropout = config.dropout
        self.recompute = config.recomputed[block] != "off"

    def forward(self, h: Tensor, x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Returns h + dropout(ff(x))."""
        if self.recompute and torch.is_grad_enabled() and not residual.is_fused(x) and is_plain(self.inner, self.outer):
            mask = None if dropout is None else draw_mask(x, dropout.rate, dropout.seed)
            scale = 1 / (1 - self.dropout)
            return h + feed_forward.recomputed_feed_forward(x, self.inner, self.outer, self.outer.bias, mask, scale)
        return add(h, self.branch(x), dropout)

    def branch(self, x: Tensor) -> Product:
        """Returns ff(x)."""
        inner, outer = self.inner, self.outer
        if not is_plain(inner, outer):
            return product(gelu(product(x, inner)), outer)
        if not torch.is_grad_enabled():
            return Product(feed_forward.feed_forward_in_parts(x, inner, outer), None)
        if self.recompute:
            return Product(feed_forward.recomputed_feed_forward(x, inner, outer, None), outer.bias)
        if feed_forward.is_fused(x.device, x.dtype, inner):
            return feed_forward.fused_feed_forward(x, inner, outer)
        return product(gelu(product(x, inner)), outer)


class ResidualBlock(nn.Module):
    """One block with its residual connections: H -> (H + a(H)) + b(H)."""

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.norm_attention = make_norm(config)
        self.attention = Attention(config, block)
        self.norm_ff = make_norm(config)
        self.ff = FeedForward(config, block)
        self.dropout = config.dropout

    def forward(
        self, h: Tensor, attend: Attend | None = None, seeds: Tensor | None = None, rotation: Tensor | None = None,
        branch: Branch | None = None, carry: bool = False,
    ) -> Tensor | tuple[Tensor, Branch]:  # fmt: skip
        """`seeds`: of the two dropout masks, [2]; without them nothing is dropped. `rotation`: of rotary positions.

        `branch`: what the block before has left to be added to h. `carry`: leave b(H) to the next block in the same way.
        """
        dropouts = (None, None) if seeds is None else [Dropout(self.dropout, seed) for seed in seeds]
        if branch is None:
            h, x = normalize(h, self.norm_attention)
        else:
            h, x = add_and_normalize(h, branch.product, self.norm_attention, branch.dropout)
        h, x = add_and_normalize(h, self.attention(x, attend, rotation), self.norm_ff, dropouts[0])
        return (h, Branch(self.ff.branch(x), dropouts[1])) if carry else self.ff(h, x, dropouts[1])


def make_norm(config: ModelConfig) -> nn.Module:
    return Norm(config.width) if config.norm == "layer" else RootMeanSquareNorm()


class SparseTransformer(nn.Module):
    """An autoregressive network over bytes. Byte t is predicted from the bytes before it, so it is causal throughout.

    Bytes are whole numbers from 0 to 255, [batch, n] with n <= config.context; the first one is predicted from a learned
    start vector. `model(tokens)` returns logits [batch, n, 256], `model.nats(tokens)` -log p of every byte, [batch, n],
    and `model.loss(tokens)` their mean. Weights are float32, and by default activations too (`ModelConfig.precision`).

    Example:
        >>> import torch
        >>> from longstride import ModelConfig, SparseTransformer
        >>> model = SparseTransformer(ModelConfig(2, 64, 2, 256, "interleave(strided(16))", "matrix(16)"))
        >>> tokens = torch.randint(256, (2, 256), dtype=torch.uint8)
        >>> model(tokens).shape
        torch.Size([2, 256, 256])
        >>> round(model.loss(tokens).item() / 0.6931, 2)  # bits per byte, before training
        8.0

    `save_pretrained(folder)` and `from_pretrained(folder)` keep a model; `preset(name)` gives the paper's configs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_memory(config, torch.get_default_device())
        self.config = config = config.resolved()
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(ResidualBlock(config, block) for block in range(config.layers))
        self.norm = make_norm(config)
        self.output = Linear(config.width, BYTES, bias=False)
        self.recomputed, self.host_memory = config.recomputed, HostMemory()
        initialise(self, config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of every byte. For long sequences `nats` takes far less memory."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns H_N, the output of the last block."""
        self.check_tokens(tokens)
        h = self.embedding(tokens, self.config.dtype)
        rotation = self.embedding.rotation(torch.arange(tokens.shape[1], device=tokens.device))
        recomputed = self.recomputed if torch.is_grad_enabled() else ("off",) * len(self.blocks)
        host = HostInputs(self.host_memory, h, recomputed.count("host")) if "host" in recomputed else None
        dropout = self.training and self.config.dropout > 0
        seeds = draw_seeds(len(self.blocks), h.device) if dropout else [None] * len(self.blocks)
        branch: Branch | None = None
        with cast_together(self.blocks, recomputed, h.dtype, residual.is_fused(h)):
            for segment in segment_slices(recomputed):
                choice, own_seeds = recomputed[segment.start], seeds[segment]
                if host is not None and choice != "host":
                    host.leave_device()
                if choice in IN_PARTS:
                    own_host = host if choice == "host" else None
                    h = blocks_in_parts(list(self.blocks[segment]), h, list(own_seeds), rotation, own_host)
                elif self._carries(h, segment.start, recomputed):
                    h, branch = self.blocks[segment.start](h, None, own_seeds[0], rotation, branch, carry=True)
                else:
                    h = _checkpointed(self.blocks[segment.start], choice)(h, None, own_seeds[0], rotation, branch)
                    branch = None
        return h

    def _carries(self, h: Tensor, block: int, recomputed: Sequence[str]) -> bool:
        """Whether a block leaves its last addition to the next: that saves a pass over memory in each direction.

        Not to a block that is recomputed, which would have to keep one more tensor; nor with fsdp, which wraps blocks and
        frees the bias of a block after it; nor with hooks, which expect the stream, or with another module as `ff`.
        """
        plain = all(_is_plain(one) for one in self.blocks[block : block + 2])
        return residual.is_fused(h) and plain and list(recomputed[block : block + 2]) == ["off", "off"]

    def logits(self, h: Tensor) -> Tensor:
        """Returns norm(H_N) W_out, in float32 at least."""
        return residual.logits(h, self.norm, self.output)

    def nats(self, tokens: Tensor) -> Tensor:
        """Returns -log p of every byte given those before it, [batch, n]."""
        return nats(self.hidden(tokens), self.logits, tokens, self.config.chunk)

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns the mean of `nats`; divided by log(2) it is bits per byte."""
        return self.nats(tokens).mean()

    def parameter_count(self) -> int:
        """Returns the number of learned parameters: embeddings, blocks, norms and output, as the paper counts them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, folder: str | Path, dtype: str = "float32") -> None:
        """Writes config.json and model.safetensors, which `from_pretrained` reads. `dtype`: float32, or float16 or bfloat16
        for a file of half the size."""
        pretrained.save(folder, self.config, self.state_dict(), dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **changes: Any) -> "SparseTransformer":
        """Loads a model from a folder of `save_pretrained`, a run, or one of a run's checkpoints/step-N; or a model that
        comes with longstride, by its name: "text".

        `changes`: config fields that do not affect the weights, such as precision.
        """
        config, weights = pretrained.load(folder, changes)
        with torch.device("meta"):
            model = cls(config)
        pretrained.check(folder, {name: tuple(x.shape) for name, x in model.state_dict().items()}, weights)
        model.load_state_dict(weights, assign=True)
        return model

    def check_tokens(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.dtype not in INTEGER_DTYPES:
            raise ValueError(
                f"SparseTransformer: bytes must be whole numbers [batch, n], got {tokens.dtype} {list(tokens.shape)}"
            )
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(
                f"SparseTransformer: n must be from 1 to context = {self.config.context:,}, got {tokens.shape[1]:,}"
            )
        # Not on a GPU, where it would synchronize, nor under torch.compile, where it would break the graph.
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            least, most = int(tokens.min()), int(tokens.max())
            if not 0 <= least <= most < BYTES:
                raise ValueError(f"SparseTransformer: bytes must be 0 to 255, got {least} to {most}")


def _is_plain(block: nn.Module) -> bool:
    """Whether a block and its `ff` are what they were made as, without hooks."""
    of_type = type(block) is ResidualBlock and type(block.ff) is FeedForward
    return of_type and not (has_hooks(block) or has_hooks(block.ff))  # type: ignore[arg-type]


def _checkpointed(block: nn.Module, choice: str) -> Callable[..., Tensor]:
    """Activation checkpointing: saves h only and recomputes the block in backward, with the same dropout masks."""
    if choice == "off":
        return block
    contexts: dict[str, Any] = {}
    if choice == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, **contexts)


def _keep_attention(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    ours = getattr(operator, "namespace", "") == "longstride"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE
