"""Our attention in models of transformers: attn_implementation="longstride".

    set_attention_pattern(model, "local(128) | column(128)")         one pattern for all layers and heads
    set_attention_pattern(model, ["local(128)", "column(128)"] * 6)  one for each layer

The pattern is a part of the model's config, so `save_pretrained` keeps it. Layers with a sliding window keep theirs. What
`attend` cannot compute is an error and never left out: dropout of attention weights, other masks, sinks, softcapping,
cross-attention, static caches.

Shapes: query [batch, heads, n_q, d]; key and value [batch, key heads, n_k, d]; the result [batch, n_q, heads, d].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from longstride.attention.api import attend
from longstride.common.checks import short_repr
from longstride.model.saved_config import MODEL_TYPE
from longstride.patterns import Local, Pattern
from longstride.patterns.notation import parse
from longstride.transformers.config_field import FIELD, NAME, PatternLike, check_patterns, register_field
from longstride.transformers.masks import longstride_mask, read_mask

HARMLESS = {
    "cache_position", "ignore_index", "is_causal", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "sliding_window", "tokenizer", "use_cache",
}  # fmt: skip
"""Arguments of attention functions that do not change what is computed from query, key, value and mask."""


def set_attention_pattern(model: PreTrainedModel, pattern: PatternLike | Sequence[PatternLike | None]) -> None:
    """Makes a model of transformers attend by a pattern, in place.

    Args:
        model: A decoder whose attention can be set, such as GPT-2, Llama or Qwen3. Layers with a sliding window keep it.
        pattern: A Pattern or its text. Text with commas has one pattern per head: "local(128), column(128)". A list has an
            entry for each layer: None for those with a sliding window, or without attention.
    """
    owner, config = "set_attention_pattern", getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        raise ValueError(f"{owner}: model must be a model of transformers, got {type(model).__name__}")
    if getattr(config, "model_type", None) == MODEL_TYPE:
        raise ValueError(f"{owner}: model = {type(model).__name__} has its own pattern; give it as `pattern` in its config")
    chosen = check_patterns(owner, "pattern", config, pattern)
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{owner}: model = {type(model).__name__} has no attention that can be set; give one with AttentionInterface"
        )
    setattr(config, FIELD, chosen)


def longstride_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: `attend` by the pattern of the module's layer. The queries are the last of the keys."""
    _refuse(module, dropout, others)
    documents, window = read_mask(attention_mask, key.shape[2])
    if others.get("sliding_window") not in (None, window):
        raise ValueError(
            f"longstride: sliding_window = {others['sliding_window']} is not in the layer's mask; use another "
            "attn_implementation"
        )
    pattern = _layer_pattern(module, window)
    run = attend if documents is None else _attend_documents
    attended = run(query, key, value, pattern, scale=scaling, documents=documents)
    return attended.transpose(1, 2).contiguous(), None


@torch.compiler.disable(reason="longstride: torch.compile with fullgraph=True takes no packed sequences")  # type: ignore[untyped-decorator]
def _attend_documents(*given: Any, **others: Any) -> Tensor:
    """`attend`, which reads documents on the host."""
    return attend(*given, **others)


def _layer_pattern(module: nn.Module, window: int | None) -> Pattern | tuple[Pattern, ...]:
    """Returns the pattern of a layer, or one for each head. A layer with a sliding window keeps it."""
    chosen = getattr(getattr(module, "config", None), FIELD, None)
    if chosen is None:
        raise ValueError(f"longstride: the model's config has no {FIELD}; call set_attention_pattern(model, pattern)")
    if not isinstance(chosen, str):
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer >= len(chosen):
            raise ValueError(
                f"longstride: {FIELD} has {len(chosen)} entries, none for layer {layer}; give one for each layer"
            )
        chosen = chosen[layer]
        if (chosen is None) != (window is not None):
            has = (
                "no sliding window; give its pattern" if window is None else f"a sliding window of {window} keys; give None"
            )
            raise ValueError(f"longstride: {FIELD}[{layer}] = {chosen!r} is for a layer that has {has}")
    if window is not None:
        return Local(window - 1)
    patterns = _read(chosen)
    return patterns[0] if len(patterns) == 1 else patterns


_patterns: dict[str, tuple[Pattern, ...]] = {}
"""Patterns by their text. torch.compile cannot trace `parse`, and makes no guard for the type of a constant result of it."""


def _read(text: str) -> tuple[Pattern, ...]:
    _remember(text)
    return _patterns[text]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _remember(text: str) -> bool:
    if text not in _patterns:
        _patterns[text] = parse(text)
    return True


def _refuse(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    """Raises ValueError for what `attend` does not compute."""
    if dropout:
        raise ValueError(
            f"longstride: attention dropout = {dropout} is not computed; set the config's attention_dropout (attn_pdrop for "
            "GPT-2) to 0 before the model is made"
        )
    given_causal = others.get("is_causal")
    is_causal = getattr(module, "is_causal", False) if given_causal is None else given_causal
    is_cross = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if not is_causal or is_cross:
        raise ValueError(
            f"longstride: {type(module).__name__} is not causal self-attention (its is_causal is not True, or it is "
            "cross-attention); use another attn_implementation"
        )
    for name, given in others.items():
        if given is not None and given is not False and name not in HARMLESS:
            shown = "a tensor" if isinstance(given, Tensor) else short_repr(given)
            raise ValueError(
                f"longstride: {name} = {shown} is not computed; turn it off in the model's config, leave it out of "
                "the call, or use another attn_implementation"
            )


def register() -> None:
    """Makes attn_implementation="longstride" known to transformers, and its models know model.set_attention_pattern(...)."""
    AttentionInterface.register(NAME, longstride_attention)
    AttentionMaskInterface.register(NAME, longstride_mask)
    PreTrainedModel.set_attention_pattern = set_attention_pattern
    register_field()
