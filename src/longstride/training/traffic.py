"""Bytes that a training step sends between processes, computed from the config.

An all-gather of a tensor over N processes, and a reduce-scatter, each send (N - 1) / N of the tensor from every process.
That is the minimum, and a ring reaches it. Each process receives as much.

Messages of a few bytes, such as the loss, and those of Muon and Adafactor are not counted.
"""

from dataclasses import replace

import torch

from longstride.model.config import ModelConfig
from longstride.model.presets import PRESETS
from longstride.training.averaging import averaging_dtype
from longstride.training.config import TrainConfig
from longstride.training.presets import train_preset

GPU = torch.device("cuda")
WEIGHT = torch.float32.itemsize
MB = 1e6
COLUMNS = ("million weights", "ddp, bfloat16", "ddp, float32", "fsdp, bfloat16", "fsdp, each further part")


def step_bytes(config: TrainConfig, processes: int, device: torch.device = GPU) -> int:
    """Returns the bytes that each process sends. With gradient accumulation, only the last part averages gradients."""
    dtype = averaging_dtype(config.averaging, config.model.precision, device)
    gradients = config.model.parameters * dtype.itemsize
    if config.parallel == "ddp":
        return _sent_bytes(2 * gradients, processes)  # A reduce-scatter and an all-gather.
    return _sent_bytes(config.accumulate * part_bytes(config.model) + gradients, processes)


def part_bytes(model: ModelConfig) -> int:
    """Returns the bytes of weights that FSDP gathers for one forward and backward pass.

    Each block twice, as it is resharded in between; embeddings, the last norm and the output layer once.
    """
    return WEIGHT * (model.parameters + model.layers * model.block_parameters)


def table(processes: int = 8) -> str:
    """Returns the megabytes per step of each preset as a Markdown table, without the small presets."""
    lines = [f"| preset | {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * len(COLUMNS)}"]
    for name in PRESETS:
        if not name.endswith("-small"):
            lines.append(f"| {name} | {' | '.join(f'{value / MB:,.0f}' for value in _row(name, processes))} |")
    return "\n".join(lines) + "\n"


def _row(name: str, processes: int) -> list[int]:
    base = train_preset(name, accumulate=1, averaging="bfloat16")
    float32, fsdp = replace(base, averaging="float32"), replace(base, parallel="fsdp")
    steps = [step_bytes(config, processes) for config in (base, float32, fsdp)]
    return [base.model.parameters, *steps, _sent_bytes(part_bytes(base.model), processes)]


def _sent_bytes(tensor_bytes: int, processes: int) -> int:
    return tensor_bytes * (processes - 1) // processes


if __name__ == "__main__":
    print(table(), end="")
