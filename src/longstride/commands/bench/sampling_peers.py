"""Alternatives to our sampling: a dense network of the same sizes in transformers, and ours without a cache.

Each takes prompts [batch, position] and a number of steps, and times the steps after the first.
"""

from importlib.metadata import version
from importlib.util import find_spec
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longstride.model import ModelConfig, SparseTransformer
from longstride.model.byte_cost import step_bytes

UNCACHED_STEPS = 4
"""Few, since each is a whole forward pass."""
TRANSFORMERS_STEPS = 64
"""Few, since it samples some 16 bytes per second with a deep network on a GPU, at any position."""


class Timing(NamedTuple):
    """Seconds a step, the mean of `steps` steps from position `first` on."""

    seconds: float
    first: int
    steps: int


class Contender(Protocol):
    def time(self, prompts: Tensor, steps: int) -> Timing: ...

    def floor_bytes(self, batch: int, first: int, steps: int) -> float:
        """The bytes that a step must read."""

    def cache_bytes(self, batch: int, length: int) -> int:
        """The size of a cache of `length` positions."""


class Uncached:
    """Our network without a cache: each byte takes a forward pass over the whole sequence."""

    def __init__(self, model: SparseTransformer) -> None:
        self.model = model

    @torch.inference_mode()
    def time(self, prompts: Tensor, steps: int) -> Timing:
        batch, position = prompts.shape
        tokens, steps = prompts, min(steps, UNCACHED_STEPS)
        for step in range(steps + 1):
            if step == 1:
                begun = _now(prompts.device)
            # Slot j reads the bytes before j: the next byte is predicted by one more slot, whose own byte does not matter.
            h = self.model.hidden(torch.cat([tokens, tokens.new_zeros(batch, 1)], 1))
            logits = self.model.logits(h[:, -1:])[:, 0]
            new = torch.multinomial(logits.softmax(-1), 1)
            tokens = torch.cat([tokens, new.to(tokens.dtype)], 1)
        return Timing((_now(prompts.device) - begun) / steps, position + 1, steps)

    def floor_bytes(self, batch: int, first: int, steps: int) -> float:
        return step_bytes(self.model.config, batch, first, steps)

    def cache_bytes(self, batch: int, length: int) -> int:
        return 0


class Transformers:
    """generate() of a GPT-2 with our network's sizes, and with its weights where the shapes agree."""

    def __init__(self, model: SparseTransformer) -> None:
        self.config = config = model.config
        self.model = _gpt2(config)
        _copy(model, self.model)
        device, dtype = next(model.parameters()).device, config.dtype
        self.model = self.model.to(device=device, dtype=dtype).eval()
        self.number_bytes: int = dtype.itemsize

    @torch.inference_mode()
    def time(self, prompts: Tensor, steps: int) -> Timing:
        from transformers import StoppingCriteriaList

        stamps: list[float] = []

        def note(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            """Called after each byte: records the time, and ends no stream."""
            stamps.append(_now(tokens.device))
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        batch, position = prompts.shape
        steps = min(steps, TRANSFORMERS_STEPS)
        given = prompts.long() if position else torch.zeros(batch, 1, dtype=torch.long, device=prompts.device)
        self.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=True, top_k=0, top_p=1.0,
            temperature=1.0, min_new_tokens=steps + 1, max_new_tokens=steps + 1, use_cache=True,
            stopping_criteria=StoppingCriteriaList([note]),
        )  # fmt: skip
        if len(stamps) != steps + 1:
            raise RuntimeError(f"it made {len(stamps)} bytes of {steps + 1}")
        return Timing((stamps[-1] - stamps[0]) / steps, position + 1, steps)

    def floor_bytes(self, batch: int, first: int, steps: int) -> float:
        tables = (self.model.transformer.wte, self.model.transformer.wpe)  # Only some rows are read.
        weights: int = sum(x.numel() for x in self.model.parameters()) - sum(table.weight.numel() for table in tables)
        seen = first + (steps - 1) / 2 + 1
        return self.number_bytes * (weights + batch * seen * self._numbers_per_position())

    def cache_bytes(self, batch: int, length: int) -> int:
        return self.number_bytes * batch * length * self._numbers_per_position()

    def _numbers_per_position(self) -> int:
        """The numbers in the keys and values of a position."""
        return 2 * self.config.layers * self.config.width


def missing() -> str | None:
    """Why transformers cannot be used; None if it can."""
    return None if find_spec("transformers") else "transformers is not installed: pip install transformers"


def transformers_version() -> dict[str, str]:
    return {} if missing() else {"transformers": version("transformers")}


def _gpt2(config: ModelConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    network: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=config.context, n_embd=config.width, n_layer=config.layers, n_head=config.heads,
            n_inner=config.ff_width, activation_function="quick_gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            layer_norm_epsilon=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    network.generation_config.eos_token_id = None  # No byte ends a stream.
    return network


@torch.no_grad()
def _copy(ours: SparseTransformer, theirs: Any) -> None:
    """Copies our weights. Its position embeddings stay, and so do queries and keys where ours are smaller than the width."""
    theirs.transformer.wte.weight.copy_(ours.embedding.token.weight)
    theirs.lm_head.weight.copy_(ours.output.weight)
    _copy_norm(ours.norm, theirs.transformer.ln_f)
    block: Any
    for block, other in zip(ours.blocks, theirs.transformer.h):
        _copy_norm(block.norm_attention, other.ln_1)
        _copy_norm(block.norm_ff, other.ln_2)
        for source, target in (
            (block.attention.query_key_value, other.attn.c_attn),
            (block.attention.project, other.attn.c_proj),
            (block.ff.inner, other.mlp.c_fc),
            (block.ff.outer, other.mlp.c_proj),
        ):
            if source.weight.T.shape == target.weight.shape:
                target.weight.copy_(source.weight.T)
                if source.bias is not None:
                    target.bias.copy_(source.bias)


def _copy_norm(ours: nn.Module, theirs: Any) -> None:
    if isinstance(ours, nn.LayerNorm):
        theirs.weight.copy_(ours.weight)
        theirs.bias.copy_(ours.bias)


def _now(device: torch.device) -> float:
    """The time, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return perf_counter()
