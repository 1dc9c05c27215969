"""Versions, devices, the implementation that `attend` selects on each, and the cost of sampling from a model."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longstride.attention import attend
from longstride.attention.implementation import choose
from longstride.attention.kernels import saved
from longstride.common.console import with_noun
from longstride.common.device import choose_device, describe_machine
from longstride.model.byte_cost import cache_bytes, dense_cache_bytes, kept, keys_seen, weight_bytes
from longstride.model.config import ModelConfig
from longstride.model.saved_config import find_config
from longstride.patterns import Column, Local
from longstride.sampling.streams import choose_implementation as choose_maker
from longstride.version import __version__

OPTIONAL = {"triton": "GPU kernels", "matplotlib": "pictures"}


def examine(model: str = "") -> bool:
    """Prints the report, with the cost of sampling if a model is named. Returns whether everything works."""
    config = find_config("doctor", model) if model else None
    all_work = True
    for what, finding in report():
        print(f"{what:<16}{finding}")
        all_work &= "FAILED" not in finding and "DISAGREES" not in finding
    if config is not None:
        show_sampling(model, config)
    return all_work


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
            yield f"auto on {device}", f"{picked.impl}: {picked.reason}; {_compare_with_reference(device)}"


def sampling_report(name: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Lines of (what, finding): the cost of sampling one byte."""
    device = choose_device("doctor", "auto")
    weights = f"{_mib(weight_bytes(config))} of weights in {config.precision}"
    if device.type == "cpu" and config.precision in ("bfloat16", "float16"):
        weights += f", {_mib(weight_bytes(replace(config, precision='float32')))} in float32, which a CPU uses"
    yield "sampling", f"{name}: {config.parameters:,} parameters, {weights}"
    for streams in (1, 64):
        decoder, why = choose_maker(config, streams, device)
        yield with_noun(streams, "stream"), f"{decoder}: {why}"
    cache, dense = cache_bytes(config), dense_cache_bytes(config)
    yield "cache", f"{_mib(cache)} a stream, {cache / dense:.1%} of the {_mib(dense)} that dense attention would keep"
    seen, all_keys = keys_seen(config, config.context - 1), config.layers * config.heads * config.context
    yield "keys", f"{seen:,.0f} read for the last byte of {config.context:,}, {seen / all_keys:.1%} of what dense would read"


def show_sampling(name: str, config: ModelConfig, console: Console | None = None) -> None:
    """Prints the cost of sampling, and a table of the cache with a row for each pattern."""
    console = console or Console()
    for what, finding in sampling_report(name, config):
        console.print(f"{what:<16}{finding}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("pattern", overflow="fold")
    table.add_column("heads of\nall blocks", justify="right", no_wrap=True)
    table.add_column("each keeps", overflow="fold")
    for heading in ("keys of the\nlast byte", "cache of\na stream"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in kept(config):
        table.add_row(repr(row.pattern), f"{row.heads:,}", row.slots, f"{row.seen:,}", _mib(row.bytes))
    console.print(table)


def devices() -> list[torch.device]:
    available = [torch.device("cpu")]
    available += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        available.append(torch.device("mps"))
    return available


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 10 * 2**20 else f"{size / 2**20:.2g} MiB"


def _installed(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def _settings() -> str:
    """The file of the kernels' settings, and the GPUs in it."""
    path = saved.place()
    if path is None:
        return f"shipped, because {saved.VARIABLE} is empty"
    try:
        by_gpu = saved.in_force()
    except ValueError as error:
        return f"FAILED here: {error}"
    if not path.exists():
        return f"shipped; longstride bench tune saves a GPU's own in {path}"
    return f"{path}: " + (", ".join(f"{len(rows)} for {name}" for name, rows in by_gpu.items()) or "it is empty")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute {properties.major}.{properties.minor}"
    about = describe_machine(device)
    return f"{about['device']}, {about['threads']} thread{'' if about['threads'] == 1 else 's'}"


def _compare_with_reference(device: torch.device) -> str:
    """Compares what `auto` selects with the reference implementation, forward and backward, on small inputs."""
    pattern = Local(5) | Column(7)
    q, k, v = (torch.randn(1, 2, 40, 8, device=device, requires_grad=True) for _ in range(3))
    try:
        results = []
        for impl in ("auto", "reference"):
            output = attend(q, k, v, pattern, impl=impl)
            results.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
        error = max((ours - oracle).abs().max().item() for ours, oracle in zip(*results))
    except Exception as failure:
        return f"FAILED here: {type(failure).__name__}: {failure}"
    return "agrees with the oracle here" if error < 1e-2 else f"DISAGREES with the oracle here, by {error:.3g}"
