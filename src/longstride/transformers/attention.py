"""Our attention in models of transformers: attn_implementation="longstride".

    set_attention_pattern(model, "local(128) | column(128)")         one pattern for all layers and heads
    set_attention_pattern(model, ["local(128)", "column(128)"] * 6)  one for each layer

The pattern is a part of the model's config, so `save_pretrained` keeps it. What `attend` cannot compute is an error and
never left out: dropout of attention weights, masks other than padding, sliding windows, sinks, softcapping,
cross-attention, static caches.

Shapes: query [batch, heads, n_q, d]; key and value [batch, key heads, n_k, d]; the result [batch, n_q, heads, d].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from longstride.attention.api import attend
from longstride.common.checks import short_repr
from longstride.model.saved_config import MODEL_TYPE
from longstride.patterns import Pattern
from longstride.patterns.notation import parse, write

NAME = "longstride"
FIELD = "longstride_pattern"
"""The field of a model's config with its pattern: text, or a list with the text of each layer."""
DOCUMENTS_DTYPE = torch.int32
"""Of the tensor that says where padding ends. Masks of users have other dtypes."""
HARMLESS = {
    "cache_position", "ignore_index", "is_causal", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "tokenizer", "use_cache",
}  # fmt: skip
"""Arguments of attention functions that do not change what is computed from query, key and value."""

PatternLike = str | Pattern


def set_attention_pattern(model: PreTrainedModel, pattern: PatternLike | Sequence[PatternLike]) -> None:
    """Makes a model of transformers attend by a pattern, in place.

    Args:
        model: A decoder whose attention can be set, such as GPT-2, Llama or Qwen3.
        pattern: A Pattern or its text. Text with commas has one pattern per head: "local(128), column(128)". A list has an
            entry for each layer.
    """
    owner, config = "set_attention_pattern", getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        raise ValueError(f"{owner}: model must be a model of transformers, got {type(model).__name__}")
    if getattr(config, "model_type", None) == MODEL_TYPE:
        raise ValueError(f"{owner}: model = {type(model).__name__} has its own pattern; give it as `pattern` in its config")
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if layers is None or heads is None:
        raise ValueError(f"{owner}: model = {type(model).__name__} has no single stack of layers; give its text model alone")
    if isinstance(pattern, PatternLike):
        chosen: str | list[str] = _text(owner, "pattern", pattern, heads)
    elif isinstance(pattern, Sequence) and len(pattern) == layers:
        chosen = [_text(owner, f"pattern[{layer}]", one, heads) for layer, one in enumerate(pattern)]
    else:
        got = f"{len(pattern)} entries" if isinstance(pattern, Sequence) else short_repr(pattern)
        raise ValueError(f"{owner}: pattern must be one for all layers or a list with one for each of {layers}, got {got}")
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{owner}: model = {type(model).__name__} has no attention that can be set; give one with AttentionInterface"
        )
    setattr(config, FIELD, chosen)


def _text(owner: str, name: str, pattern: PatternLike, heads: int) -> str:
    """Returns the text of one pattern, or of one per head."""
    if isinstance(pattern, Pattern):
        return pattern.text
    if not isinstance(pattern, str):
        raise ValueError(f"{owner}: {name} must be a Pattern or its text, got {short_repr(pattern)}")
    found = parse(pattern)
    if len(found) not in (1, heads):
        raise ValueError(
            f"{owner}: {name} = {short_repr(pattern)} has {len(found)} patterns for {heads} heads; give 1 or {heads}"
        )
    return write(found)


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
    documents = _documents(attention_mask)
    patterns = _layer_patterns(module)
    pattern = patterns[0] if len(patterns) == 1 else patterns
    attended = attend(query, key, value, pattern, scale=scaling, documents=documents)
    return attended.transpose(1, 2).contiguous(), None


def _layer_patterns(module: nn.Module) -> tuple[Pattern, ...]:
    chosen = getattr(getattr(module, "config", None), FIELD, None)
    if chosen is None:
        raise ValueError(f"longstride: the model's config has no {FIELD}; call set_attention_pattern(model, pattern)")
    if isinstance(chosen, str):
        return _read(chosen)
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(chosen):
        raise ValueError(f"longstride: {FIELD} has {len(chosen)} entries, none for layer {layer}; give one for each layer")
    return _read(chosen[layer])


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
    is_causal = getattr(module, "is_causal", True) if given_causal is None else given_causal
    if not is_causal or getattr(module, "is_cross_attention", False):
        raise ValueError("longstride: attention must be causal self-attention; use another attn_implementation")
    for name, given in others.items():
        if given is not None and given is not False and name not in HARMLESS:
            shown = "a tensor" if isinstance(given, Tensor) else short_repr(given)
            raise ValueError(
                f"longstride: {name} = {shown} is not computed; turn it off in the model's config, or use another "
                "attn_implementation"
            )


def _documents(mask: Tensor | None) -> Tensor | None:
    if mask is None or (mask.dtype == DOCUMENTS_DTYPE and mask.dim() == 2):
        return mask
    raise ValueError(
        f"longstride: attention_mask = {mask.dtype} {list(mask.shape)} is not computed; give a mask of padding, [batch, n]"
    )


def longstride_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask function: None without padding on the left, otherwise a number for each key that tells padding from text.

    A pattern then counts from the first token of the text, so a row's results are those of the row without padding. Padding
    on the right needs no mask: no query before it sees it, and results at padding mean nothing. Padding between is an error.
    """
    if mask_function is not causal_mask_function:
        hint = " (under torch.compile give attention_mask, as ones)" if torch.compiler.is_compiling() else ""
        raise ValueError(
            "longstride: only causal masks with padding are computed, no sliding window, no cross-attention, no packed "
            f"sequences by position_ids, no other mask{hint}; turn it off in the model's config, or use another "
            "attn_implementation"
        )
    if kv_offset or not isinstance(q_offset, int) or q_offset + q_length != kv_length:
        raise ValueError(
            "longstride: the cache must hold all keys and no others; use the default DynamicCache, no static or sliding one"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, kv_length):
        raise ValueError(f"longstride: attention_mask must be {[batch_size, kv_length]}, got {list(attention_mask.shape)}")
    if torch.compiler.is_compiling():
        torch._assert_async(attention_mask.all(), "longstride: under torch.compile attention_mask must have no padding")
        return None
    text = attention_mask.bool()
    first = text[:, :1]
    if bool((first & (text[:, 1:] <= text[:, :-1]).all(1, keepdim=True)).all()):
        return None
    documents = (text.cumsum(1) > 0).to(DOCUMENTS_DTYPE)
    if bool((text[:, 1:] & ~text[:, :-1] & (documents[:, :-1] == 1)).any()):
        raise ValueError(
            "longstride: attention_mask has padding between tokens; pad on the left (padding_side='left') to generate"
        )
    return documents


def register() -> None:
    """Makes attn_implementation="longstride" known to transformers, and its models know model.set_attention_pattern(...)."""
    AttentionInterface.register(NAME, longstride_attention)
    AttentionMaskInterface.register(NAME, longstride_mask)
    PreTrainedModel.set_attention_pattern = set_attention_pattern
