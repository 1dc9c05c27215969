"""Which implementation of `attend` runs on a device."""

import importlib.util
import os
from typing import NamedTuple

import torch

from longstride.common.checks import suggest

CHOICES = ("auto", "reference", "blocked", "triton")
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Looked up at import: some versions of torch.compile cannot trace `find_spec`."""


class Choice(NamedTuple):
    """The implementation that runs, and the reason for it."""

    impl: str
    reason: str


def choose(impl: str, device: torch.device) -> Choice:
    """Returns the implementation for `impl` on this device; an error if it cannot run there."""
    if impl not in CHOICES:
        raise ValueError(f"attend: impl = {impl!r} is not an implementation; {suggest(str(impl), CHOICES)}")
    on_gpu = device.type == "cuda"
    if impl == "triton" or (impl == "auto" and on_gpu):
        missing = _missing_for_triton(device)
        if missing:
            raise RuntimeError(
                f"attend: impl = {impl!r} on {device} needs {missing}; impl = 'blocked' runs on every device, more slowly"
            )
        reasons = {"cuda": "kernels for this GPU", "meta": "asked for by name; only shapes are computed"}
        return Choice("triton", reasons.get(device.type, "asked for by name; Triton interprets the kernels"))
    if impl == "auto":
        return Choice("blocked", "plain PyTorch, the fastest implementation without a GPU that Triton supports")
    return Choice(impl, "asked for by name")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def implementation_name(impl: str, device_type: str) -> str:
    """As `choose`. torch.compile calls this once instead of tracing it, which would add a guard for each name it reads."""
    if device_type == "cuda" and impl in ("auto", "triton") and HAS_TRITON:  # The usual case; this saves 2 us.
        return "triton"
    return choose(impl, torch.device(device_type)).impl


def _missing_for_triton(device: torch.device) -> str | None:
    if not HAS_TRITON:
        return "Triton, which is not installed: pip install triton"
    if device.type not in ("cuda", "meta") and os.environ.get("TRITON_INTERPRET") != "1":
        return "a CUDA device, or TRITON_INTERPRET=1 in the environment to try the kernels out without one"
    return None
