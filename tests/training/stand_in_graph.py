"""A graph that stands in for CUDA's on a CPU: recording runs nothing, and a replay calls the work with the same tensors."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch

from longstride.training import capture, optimizer, trainer


@contextmanager
def on_device():
    """Optimizers that read from the device whether to skip a step, as on a GPU."""
    with (
        patch.object(trainer, "make_optimizers", partial(optimizer.make_optimizers, fused=True)),
        patch.object(trainer, "can_skip_on_device", lambda optimizers: True),
    ):
        yield


@contextmanager
def stand_in_graphs():
    """Yields all graphs that are recorded, each as the list of its replays."""
    made = []

    def record(work, stream):
        output, replays = torch.full((5,), float("nan")), []
        made.append(replays)

        def replay():
            replays.append(len(replays))
            output.copy_(work())

        return capture.Graph(replay, output)

    with ExitStack() as stack:
        stack.enter_context(on_device())
        stack.enter_context(patch.object(capture, "record", record))
        stack.enter_context(patch.object(capture, "obstacle", lambda config, device, ranks: None))
        yield made
