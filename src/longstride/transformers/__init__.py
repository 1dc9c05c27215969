"""Hugging Face transformers: our attention in its models. Imports from sampling and everything left of it.

`import longstride.transformers` registers attn_implementation="longstride". Needs transformers: pip install
'longstride[transformers]'.
"""

from longstride.transformers.attention import register, set_attention_pattern

__all__ = ["set_attention_pattern"]

register()
