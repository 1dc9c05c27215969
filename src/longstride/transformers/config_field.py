"""longstride_pattern: the field of a model's config with the patterns of its layers.

It is text, or a list with the text of each layer and None for layers that keep their own sliding window, or for those
without attention. A config that has it writes attn_implementation = "longstride" to its config.json, which transformers
reads: without `import longstride.transformers` such a folder is refused instead of attending densely.
"""

import functools
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from longstride.common.checks import short_repr
from longstride.patterns import Pattern
from longstride.patterns.notation import parse, write

NAME = "longstride"
FIELD = "longstride_pattern"
SAVED = "attn_implementation"
"""The key of config.json by which transformers knows the implementation."""
CHOICES_OF_KEYS = ("index_topk", "keep_window_size")
"""Fields of models that choose each query's keys themselves: by an indexer, such as DeepSeek V3.2, or as Doge does."""

WINDOWS = ("sliding_attention", "hybrid_sliding")
"""Kinds of layers that keep a sliding window of their own."""
NO_KEYS = ("linear_attention", "mamba", "recurrent", "conv", "moe")
"""Kinds of layers in which no query sees keys."""

PatternLike = str | Pattern
Field = str | list[str | None]


def check_patterns(owner: str, name: str, config: Any, given: Any) -> Field:
    """Returns patterns in the notation that the config keeps; ValueError if they do not fit the config's layers."""
    layers, heads = (getattr(config, size, None) for size in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int):
        kind = getattr(config, "model_type", None)
        raise ValueError(f"{owner}: model_type = {kind!r} has no single stack of layers; give its text model alone")
    for choice in CHOICES_OF_KEYS:
        size = getattr(config, choice, None)
        if size is not None:
            raise ValueError(
                f"{owner}: model_type = {config.model_type!r} chooses the keys of each query itself, by {choice} = {size}, "
                "which is not computed; use another attn_implementation"
            )
    kinds = _kinds(config, layers)
    if all(kind in WINDOWS for kind in kinds):
        raise ValueError(
            f"{owner}: all layers keep their sliding window, of {config.sliding_window} keys, so {name} has no effect; set "
            "the config's sliding_window to None before the model is made"
        )
    if all(kind in (*WINDOWS, *NO_KEYS) for kind in kinds):
        raise ValueError(
            f"{owner}: model_type = {config.model_type!r} has no layers of full attention, only "
            f"{' and '.join(sorted(set(kinds)))}, so {name} has no effect; use another attn_implementation"
        )
    if isinstance(given, PatternLike):
        return _text(owner, name, given, heads)
    if not isinstance(given, Sequence) or len(given) != layers:
        got = f"{len(given)} entries" if isinstance(given, Sequence) else short_repr(given)
        raise ValueError(f"{owner}: {name} must be one for all layers or a list with one for each of {layers}, got {got}")
    return [_of_layer(owner, f"{name}[{layer}]", entry, heads, kinds[layer]) for layer, entry in enumerate(given)]


def _kinds(config: Any, layers: int) -> list[str]:
    """Returns the kind of each layer, in the words of transformers."""
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, Sequence) and len(kinds) == layers:
        return list(kinds)
    return ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"] * layers


def _of_layer(owner: str, name: str, pattern: Any, heads: int, kind: str) -> str | None:
    if pattern is None and kind in (*WINDOWS, *NO_KEYS):
        return None
    if kind in WINDOWS:
        raise ValueError(
            f"{owner}: {name} = {short_repr(pattern)} is for a layer with a sliding window, which it keeps; give None"
        )
    return _text(owner, name, pattern, heads)


def _text(owner: str, name: str, pattern: Any, heads: int) -> str:
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


def _get(config: PretrainedConfig) -> Field | None:
    return config.__dict__.get(FIELD)


def _set(config: PretrainedConfig, given: Any) -> None:
    """Called with what config.json has, too."""
    if given is None:
        config.__dict__.pop(FIELD, None)
        return
    config.__dict__[FIELD] = check_patterns(type(config).__name__, FIELD, config, given)


def register_field() -> None:
    """Makes configs of transformers validate the field, and models attend by it unless told another attn_implementation."""
    setattr(PretrainedConfig, FIELD, property(_get, _set))
    choose, write_fields = PreTrainedModel.get_correct_attn_implementation, PretrainedConfig.to_dict

    @functools.wraps(write_fields)
    def to_dict(config: PretrainedConfig) -> dict[str, Any]:
        # As an attribute of the config, it would be what from_pretrained(attn_implementation=...) sets.
        return {**write_fields(config), **({SAVED: NAME} if FIELD in config.__dict__ else {})}

    @functools.wraps(choose)
    def choose_by_field(model: PreTrainedModel, requested_attention: str | None, *others: Any, **given: Any) -> Any:
        # Configs of several parts forget what config.json says about a part.
        if requested_attention is None and getattr(model.config, FIELD, None) is not None:
            requested_attention = NAME
        chosen = choose(model, requested_attention, *others, **given)
        patterns = getattr(model.config, FIELD, None)
        if chosen == NAME and patterns is not None:  # Its number of layers may have been changed since it was read.
            check_patterns(type(model.config).__name__, FIELD, model.config, patterns)
        return chosen

    PretrainedConfig.to_dict = to_dict
    PreTrainedModel.get_correct_attn_implementation = choose_by_field
