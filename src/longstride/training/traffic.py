"""Bytes that a step sends between processes, without sending them.

To put together a tensor of which each of N processes has a part, and to add up N tensors of which each process keeps a part,
takes (N - 1) / N of a whole one from each process: less is not possible, and a ring does it. As much is received.

Left out are messages of a few bytes, as the loss is, and those of Muon and Adafactor on weights that are spread.
"""

from dataclasses import replace

import torch

from longstride.model.config import ModelConfig
from longstride.model.cost import parameter_count
from longstride.model.presets import PRESETS
from longstride.training.config import TrainConfig
from longstride.training.distributed import averaging_dtype
from longstride.training.presets import train_preset

GPU = torch.device("cuda")
WEIGHT = torch.float32.itemsize
MB = 1e6
COLUMNS = ("million weights", "ddp, bfloat16", "ddp, float32", "fsdp, bfloat16", "fsdp, each further part")


def step_bytes(config: TrainConfig, processes: int, device: torch.device = GPU) -> int:
    """Those that each process sends. With several accumulated parts, gradients are averaged in the last one alone."""
    parameters = parameter_count(config.model)
    dtype = averaging_dtype(config.averaging, config.model.precision, device)
    gradients = parameters * dtype.itemsize
    if config.parallel == "ddp":
        return _sent(2 * gradients, processes)  # Added up in parts, which are put together then.
    return _sent(config.accumulate * part_bytes(config.model) + gradients, processes)


def part_bytes(model: ModelConfig) -> int:
    """Weights that are put together for one pass and its gradient, if they are spread.

    A block twice, recomputed or not, as it is given up in between; embeddings, the last norm and the output stay.
    """
    block = parameter_count(replace(model, layers=model.layers + 1)) - parameter_count(model)
    return WEIGHT * (parameter_count(model) + model.layers * block)


def table(processes: int = 8) -> str:
    """The megabytes of a step for each preset, as Markdown. Small ones need no second process."""
    lines = [f"| preset | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for name in PRESETS:
        if not name.endswith("-small"):
            lines.append(f"| {name} | {' | '.join(f'{number / MB:,.0f}' for number in _row(name, processes))} |")
    return "\n".join(lines) + "\n"


def _row(name: str, processes: int) -> list[int]:
    whole = train_preset(name, accumulate=1, averaging="bfloat16")
    exact, spread = replace(whole, averaging="float32"), replace(whole, parallel="fsdp")
    steps = [step_bytes(config, processes) for config in (whole, exact, spread)]
    return [parameter_count(whole.model), *steps, _sent(part_bytes(whole.model), processes)]


def _sent(whole: int, processes: int) -> int:
    return whole * (processes - 1) // processes


if __name__ == "__main__":
    print(table(), end="")
