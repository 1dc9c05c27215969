"""Small networks for tests."""

import torch

from longstride.model import ModelConfig, SparseTransformer


def config(**changes):
    given = {
        "layers": 3,
        "width": 16,
        "heads": 2,
        "context": 24,
        "pattern": "interleave(strided(4))",
        "embedding": "matrix(4)",
    }
    return ModelConfig(**{**given, **changes})


def model(seed=0, output=True, **changes):
    """output: the last layer, which begins as zeros, gets weights, so that everything shows in the logits."""
    torch.manual_seed(seed)
    made = SparseTransformer(config(**changes))
    if output:
        torch.nn.init.normal_(made.output.weight)
    return made


def some_bytes(batch=2, n=24, seed=1):
    return torch.randint(256, (batch, n), generator=torch.Generator().manual_seed(seed))
