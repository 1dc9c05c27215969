"""Small networks, as models of transformers."""

import torch
from transformers import PreTrainedModel

from longstride.transformers import LongstrideConfig, LongstrideForCausalLM
from tests.model import small

NEW_NAME, OLD_NAME = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW_NAME if hasattr(PreTrainedModel, f"{NEW_NAME}_enable") else OLD_NAME
"""The name in this version of transformers, of an argument and in names of methods."""


def network(**changes):
    """With weights that are large enough for likely bytes to depend on the bytes before."""
    made = small.model(**{"context": 40, **changes})
    for parameter in made.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    return made.eval()


def wrapped(**changes):
    made = network(**changes)
    model = LongstrideForCausalLM(LongstrideConfig.from_network(made.config))
    model.load_state_dict(made.state_dict())
    return model.eval()


def tokens(batch=2, n=11, seed=1):
    return small.some_bytes(batch, n, seed)
