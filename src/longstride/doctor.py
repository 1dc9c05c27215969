"""What is installed, which devices there are, and what `attend` would run on each."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator

import torch

from longstride.attention import attend
from longstride.attention.api import choose
from longstride.attention.kernels import saved
from longstride.benchmarks.measure import machine
from longstride.patterns import Column, Local
from longstride.version import __version__

OPTIONAL = {"triton": "GPU kernels", "matplotlib": "pictures"}


def report() -> Iterator[tuple[str, str]]:
    """Lines of (what, finding)."""
    yield "longstride", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    for name, purpose in OPTIONAL.items():
        yield name, _installed(name) or f"not installed (for {purpose})"
    yield "settings", _settings()
    for device in devices():
        yield f"device {device}", _describe(device)
        try:
            picked = choose("auto", device)
        except RuntimeError as error:
            yield f"auto on {device}", f"FAILED here: {error}"
        else:
            yield f"auto on {device}", f"{picked.impl}: {picked.reason}; {_try_out(device)}"


def devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def _installed(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _settings() -> str:
    """Which file has the kernels' settings, and for which GPUs."""
    path = saved.place()
    if path is None:
        return f"shipped, as {saved.VARIABLE} is empty"
    try:
        by_gpu = saved.in_force()
    except ValueError as error:
        return f"FAILED here: {error}"
    if not path.exists():
        return f"shipped; longstride bench tune saves a GPU's own in {path}"
    return f"{path}: " + (", ".join(f"{len(rows)} for {name}" for name, rows in by_gpu.items()) or "none in it")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute {properties.major}.{properties.minor}"
    about = machine(device)
    return f"{about['device']}, {about['threads']} threads"


def _try_out(device: torch.device) -> str:
    """Runs what `auto` picks against the oracle, forward and backward, on a handful of numbers."""
    pattern = Local(5) | Column(7)
    q, k, v = (torch.randn(1, 2, 40, 8, device=device, requires_grad=True) for _ in range(3))
    try:
        results = []
        for impl in ("auto", "reference"):
            output = attend(q, k, v, pattern, impl=impl)
            results.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
        wrong = max((ours - oracle).abs().max().item() for ours, oracle in zip(*results))
    except Exception as error:
        return f"FAILED here: {type(error).__name__}: {error}"
    return "agrees with the oracle here" if wrong < 1e-2 else f"DISAGREES with the oracle here, by {wrong:.3g}"
