"""Registration of the model's operators with PyTorch, so that torch.compile takes each as a whole."""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("longstride_model", "FRAGMENT")
"""Not the namespace of attention: selective recomputation keeps the results of that one."""
OPS = torch.ops.longstride_model


def define(schema: str, compute: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Registers an operator. `like`: returns empty tensors of the same shapes as the results."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longstride_model::{name}", like, lib=LIBRARY)
