"""The backends, in the order in which they are asked. For a new architecture, add its module here."""

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from longstride.attention.kernels.call import Backward, Forward
from longstride.attention.kernels.hopper.choice import is_hopper
from longstride.attention.kernels.jobs import Pass
from longstride.attention.kernels.launch import Launch

HERE = __name__.rsplit(".", 1)[0]
BACKENDS = (
    ("hopper.launch", is_hopper),
    ("general", lambda device: True),
)
"""A module, and whether it may be imported and used on a device. The last one takes everything."""


@lru_cache(maxsize=16)
def backends(device: torch.device) -> tuple[ModuleType, ...]:
    return tuple(import_module(f"{HERE}.{name}") for name, runs_on in BACKENDS if runs_on(device))


def launches(call: Forward | Backward, passes: tuple[Pass, ...]) -> list[Launch]:
    """The launches for all passes of a pattern, in order."""
    direction = "forward" if isinstance(call, Forward) else "backward"
    found: list[Launch] = []
    for index, pass_ in enumerate(passes):
        offers = (getattr(backend, direction)(call, pass_, index > 0) for backend in backends(call.q.device))
        found += next(offer for offer in offers if offer is not None)
    return found
