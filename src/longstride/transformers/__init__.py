"""Hugging Face transformers: our attention in its models, and our models in its classes.

May import every room up to sampling.

`import longstride.transformers` registers attn_implementation="longstride", and our classes with AutoConfig,
AutoModelForCausalLM and AutoTokenizer. It needs transformers: pip install 'longstride[transformers]'.
"""

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ImportError(
        "longstride.transformers needs transformers, which is not installed: pip install 'longstride[transformers]'"
    )

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longstride.model.saved_config import MODEL_TYPE
from longstride.transformers.attention import register, set_attention_pattern
from longstride.transformers.cache import LongstrideCache
from longstride.transformers.config import LongstrideConfig
from longstride.transformers.model import LongstrideForCausalLM
from longstride.transformers.tokenizer import ByteTokenizer

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideCache", "ByteTokenizer", "set_attention_pattern"]

register()
AutoConfig.register(MODEL_TYPE, LongstrideConfig, exist_ok=True)
AutoModelForCausalLM.register(LongstrideConfig, LongstrideForCausalLM, exist_ok=True)
# Trainer looks here for models whose labels it shifts when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = LongstrideForCausalLM.__name__
AutoTokenizer.register(LongstrideConfig, ByteTokenizer, exist_ok=True)
