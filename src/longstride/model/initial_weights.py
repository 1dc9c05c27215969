"""How weights begin, by `ModelConfig.init`: as section 6 of the paper says, as its authors' code has it, or as "modern"."""

from math import sqrt
from typing import Any

import torch
from torch import nn

from longstride.model.config import ModelConfig
from longstride.model.layers import Norm

SCALE = 0.125
"""Factor in the standard deviation of initial weights."""
MODERN_SCALE, MODERN_EMBEDDING, MODERN_OUTPUT = 0.5, 0.3, 0.02
"""Standard deviations with init "modern": of the blocks' weights times sqrt(d_in), of the sum of a position's embeddings,
and of the output layer."""


@torch.no_grad()
def initialise(model: Any, config: ModelConfig) -> None:
    """Section 6: normal weights by fan-in, W_2 and W_p divided by sqrt(2N), biases and output layer 0, norms 1.

    With init "modern", W_2 and W_p are 0, the output layer is not, and embeddings are larger. model: a SparseTransformer.
    """
    modern, embedding = config.init == "modern", model.embedding
    of_bytes = MODERN_EMBEDDING / sqrt(config.last_bytes) if modern else _deviation(config, config.width)
    nn.init.normal_(embedding.token.weight, std=of_bytes)
    nn.init.normal_(embedding.start, std=MODERN_EMBEDDING if modern else of_bytes)
    for table in embedding.position.values():
        nn.init.normal_(table.weight, std=of_bytes if modern else _deviation(config, config.width * len(embedding.position)))
    for table in embedding.earlier:
        nn.init.normal_(table.weight, std=of_bytes)
    for block in model.blocks:
        for linear in (block.attention.query_key_value, block.attention.project, block.ff.inner, block.ff.outer):
            nn.init.normal_(linear.weight, std=_deviation(config, linear.in_features))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for linear in (block.attention.project, block.ff.outer):
            if modern:
                nn.init.zeros_(linear.weight)
            else:
                linear.weight /= sqrt(2 * config.layers)
        if block.attention.query_scale is not None:
            nn.init.ones_(block.attention.query_scale)
    if modern:
        nn.init.normal_(model.output.weight, std=MODERN_OUTPUT)
    else:
        nn.init.zeros_(model.output.weight)
    for module in model.modules():
        if isinstance(module, Norm):
            module.reset_parameters()


def _deviation(config: ModelConfig, fan_in: int) -> float:
    by_rule = {"paper": SCALE / sqrt(fan_in), "release": sqrt(SCALE / fan_in), "modern": MODERN_SCALE / sqrt(fan_in)}
    return by_rule[config.init]
