"""Compiles every kernel that sampling launches, for an H200 and without a GPU, and prints the parameters of each.

python -m tests.sampling.ahead_of_time
"""

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longstride.sampling import batched, resident
from longstride.sampling.batched import BatchedStreams
from longstride.sampling.kernel_places import PlacedBatch
from longstride.sampling.params import SamplingParams
from longstride.sampling.resident import ResidentStreams
from tests.model.small import model


class Hopper:
    """The driver of a GPU that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def parameters():
    """Returns the number of parameters by kernel."""
    compiled = {}

    def compile_only(kernel, grid):
        def launch(*args, **options):
            binary = JITFunction.run(kernel, *args, grid=grid, warmup=True, **options)
            assert binary.asm["cubin"]
            compiled[kernel.fn.__name__] = len(kernel.arg_names)

        return launch

    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    resident.FEW_CHUNKS = 0  # So that there are attention programs.
    batched.TILE = 2  # So that keys are split.
    made = model(layers=2, context=14, width=8)
    for streams in (ResidentStreams(made, 1, 14, programs=4), BatchedStreams(made, 2, 14)):
        numbers = torch.zeros(streams.batch, dtype=torch.int32), torch.zeros(streams.batch, dtype=torch.int64)
        streams.extend(2, *numbers, SamplingParams())
    PlacedBatch(made, 2).run((0, 1), 2, has_filter=True)
    return compiled


if __name__ == "__main__":
    print(json.dumps(parameters()))
