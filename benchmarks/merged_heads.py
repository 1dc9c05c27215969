"""Merged heads with their passes in both orders, and on Hopper's and the general kernels: GPU time of each launch.

python benchmarks/merged_heads.py --json merged.json

The cases of a shape take turns in one process, and the median of `--rounds` counts. Needs a Hopper GPU.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.attention.kernels import call, general
from longstride.attention.kernels.hopper import choice, lane_settings
from longstride.attention.kernels.hopper.lane_settings import LaneSetting
from longstride.attention.kernels.launch import Plan
from longstride.attention.kernels.run import in_bits
from longstride.commands.bench.measure import seconds_each
from longstride.common.device import describe_machine
from longstride.patterns.notation import parse, write

SHAPES = {
    "enwik8": (8, 8, 12_288, 64, 64), "imagenet64": (8, 16, 12_288, 32, 32), "cifar10": (32, 2, 3072, 64, 128),
}  # fmt: skip
"""Batch, heads, n, d_qk and d_v."""
ORDERS = ("walk first", "lanes first")
KERNELS = ("general", "Hopper")
CASES = {
    "enwik8": {
        "local(128)": ("Hopper", "three walks"), "column(128)": ("Hopper",),
        "local(128) | column(128)": (*ORDERS, "three walks"),
        "block(128) | summary(128, 8)": KERNELS,
    },
    "imagenet64": {"local(128)": ("Hopper",), "local(128) | column(128)": ORDERS},
    "cifar10": {
        "local(96)": ("Hopper",), "local(96) | column(96)": ORDERS, "block(96) | summary(96, 8)": KERNELS,
        "block(96) | summary(96, 32)": KERNELS, "dense()": KERNELS, "column(16)": KERNELS, "block(512)": KERNELS,
    },
}  # fmt: skip
"""The patterns of a shape, and the variants of each."""


class Case(NamedTuple):
    """A call's two plans and their tensors."""

    forward: Plan
    forward_tensors: tuple[Tensor, ...]
    backward: Plan
    backward_tensors: tuple[Tensor, ...]


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Context in which plans are made as the variant's name says."""
    backends, settings = call.backends, lane_settings.walk_forward_settings
    lanes_first, choice.LANES_FIRST = choice.LANES_FIRST, () if name == "walk first" else (32, 64, 128)
    if name == "general":
        call.backends = lambda device: (general,)
    if name == "three walks":
        lane_settings.walk_forward_settings = lambda d, panels, accumulate: LaneSetting(3, 1, registers=168)
    try:
        yield
    finally:
        choice.LANES_FIRST, call.backends, lane_settings.walk_forward_settings = lanes_first, backends, settings


def make_case(inputs: list[Tensor], text: str) -> Case:
    q, _, v, d_output = inputs
    output, lse = torch.empty_like(v), torch.empty(q.shape[:3], device=q.device)
    scale, patterns = q.shape[3] ** -0.5, write(parse(text) * q.shape[1])
    forward_tensors = *inputs[:3], output, lse
    backward_tensors = *inputs[:3], d_output, output, lse, *(torch.empty_like(x) for x in inputs[:3])
    forward = call.make_plan(call.Forward, forward_tensors, (in_bits(scale),), patterns, True)
    settings = in_bits(scale), scale, True, True
    backward = call.make_plan(call.Backward, backward_tensors, settings, patterns, True)
    for plan, tensors in ((forward, forward_tensors), (backward, backward_tensors)):
        plan.run(tensors)
        assert plan.ready is not None, text
    return Case(forward, forward_tensors, backward, backward_tensors)


def launches(plan: Plan, tensors: tuple[Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """Calls that run one launch of a plan each, by the kernel's name."""
    if plan.workspace is not None:
        tensors = *tensors, *plan.workspace.allocate()
    addresses = [x.data_ptr() for x in tensors]
    stream = torch.cuda.current_stream().cuda_stream
    assert plan.ready is not None
    return {
        f"{number} {launch.kernel.fn.__name__}": lambda ready=ready, _=tensors: ready(addresses, stream)
        for number, (launch, ready) in enumerate(zip(plan.launches, plan.ready))
    }


def times(shape: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each case: forward, with backward, and of each launch."""
    batch, heads, n, d_qk, d_v = SHAPES[shape]
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = [torch.randn(batch, heads, n, d, device=device).bfloat16() for d in (d_qk, d_qk, d_v, d_v)]
    calls: dict[str, Callable[[], Any]] = {}
    for text, names in CASES[shape].items():
        for name in names:
            with variant(name):
                case = make_case(inputs, text)

            def both(case: Case = case) -> None:
                case.forward.run(case.forward_tensors)
                case.backward.run(case.backward_tensors)

            key = f"{text}, {name}"
            calls[f"{key}; forward"] = lambda case=case: case.forward.run(case.forward_tensors)
            calls[f"{key}; with backward"] = both
            for plan, tensors in (case[:2], case[2:]):
                calls |= {f"{key}; {launch}": run for launch, run in launches(plan, tensors).items()}
    found: dict[str, dict[str, float]] = {}
    for name, seconds in seconds_each(calls, rounds, device).items():
        key, part = name.split("; ")
        found.setdefault(key, {})[part] = 1e3 * seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda")
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        raise SystemExit("merged_heads.py: needs a Hopper GPU")
    rows = {shape: times(shape, given.rounds) for shape in SHAPES}
    for shape, cases in rows.items():
        local = next(iter(cases.values()))
        for name, parts in cases.items():
            total = ", ".join(f"{part} {parts[part]:.3f} ({parts[part] / local[part]:.2f}x)" for part in list(parts)[:2])
            print(f"{shape:<10} {name:<40} {total}")
            print(" " * 12 + ", ".join(f"{part} {value:.3f}" for part, value in list(parts.items())[2:]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": describe_machine(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
