"""Which device is meant: auto is the GPU if there is one. And how much memory a device has."""

import os

import torch


def choose_device(owner: str, name: str) -> torch.device:
    """The device, after it was tried; or an error that names whose argument it is, and why not."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{owner}: device = {name!r} cannot be used: {reason}") from None
    return torch.device(name)


def memory_bytes(device: torch.device) -> int | None:
    """All the memory of a GPU, or of the machine; None where nothing says how much that is."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
