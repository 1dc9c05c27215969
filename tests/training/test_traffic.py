"""What is reckoned is what two processes send, message by message."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.training import train_preset
from longstride.training.traffic import part_bytes, step_bytes, table
from tests.training.ranks import start
from tests.training.small import store
from tests.training.worker import plan, third_step

DOCS = Path(__file__).parents[2] / "docs"
CPU = torch.device("cpu")
SMALL_TALK = 200
"""Bytes: the loss, and of spread gradients the norm of each."""
KINDS = {"allreduce_": (0, 2), "all_reduce": (0, 2), "_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1)}
"""Of each message which argument is the whole tensor, and how often (N - 1) / N of it is sent."""
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}
HALF = {"averaging": "float16", "model": {"precision": "float16", "chunk": 32}}
CHANGES = [{}, HALF, {**HALF, "accumulate": 2}, {"accumulate": 2}, {"model": {"recompute": "on"}}, {"model": {"chunk": 32}}]
CASES = [
    {"name": f"{how}-{number}", "parallel": how, **changes}
    for how in ("ddp", "fsdp")
    for number, changes in enumerate(CHANGES)
]


class Sent(TorchDispatchMode):
    """The bytes that this process sends while it lasts, as a ring would send them."""

    def __init__(self, processes):
        super().__init__()
        self.share = (processes - 1) / processes
        self.found = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:  # To be seen again, as what it is made of.
            return NotImplemented
        if function.namespace in ("c10d", "_c10d_functional"):
            self.found += self.share * self.whole(function.__name__.partition(".")[0], args)
        return function(*args, **(kwargs or {}))

    def whole(self, name, args):
        if name in SILENT:
            return 0
        place, times = KINDS[name]
        tensors = args[place] if isinstance(args[place], list) else [args[place]]
        return times * sum(x.nbytes for x in tensors)


def sent(folder):
    """Of each case the bytes of a step."""
    return third_step(folder, CASES, Sent)


def test_a_step_sends_what_was_reckoned(tmp_path):
    store(tmp_path / "data")
    first, second = start(sent, tmp_path)
    assert first.found == second.found
    for case, found in zip(CASES, first.found):
        reckoned = step_bytes(plan(tmp_path, **case), 2, CPU)
        assert reckoned <= found <= reckoned + SMALL_TALK, case


def test_by_hand():
    """Of enwik8's weights the blocks have all but embeddings, the last norm and the output."""
    config = train_preset("enwik8")
    weights, outside = config.model.parameters, 512 * (256 + 1 + 128 + 96 + 2 + 256)
    assert step_bytes(config, 1) == 0
    assert step_bytes(config, 2) == 2 * weights  # bfloat16, as its activations are
    assert step_bytes(replace(config, averaging="float32"), 4) == 6 * weights
    assert step_bytes(replace(config, accumulate=8), 2) == step_bytes(config, 2)
    assert part_bytes(config.model) == 4 * (2 * weights - outside)
    parallel = replace(config, parallel="fsdp", accumulate=2)
    assert step_bytes(parallel, 2) == 2 * 4 * (2 * weights - outside) // 2 + weights


@pytest.mark.skipif(not DOCS.exists(), reason="not run from the repository")
def test_the_table_in_the_documentation():
    assert table() in (DOCS / "scaling.md").read_text()
