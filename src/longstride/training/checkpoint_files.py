"""Saves a run's tensors to checkpoint files and loads them, with torch.distributed.checkpoint.

Each process copies its shard of the optimizers' state to CPU memory; rank 0 also copies the full weights. Sharded weights
are gathered and loaded one at a time, so that no GPU holds all of them.
"""

import json
import warnings
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from longstride.common.tensor_file import check_finite, save_file
from longstride.training.distributed import copy_weight, full_weights, local_tensor

MEAN_SQUARES = ("exp_avg_sq", "row_var", "col_var", "variance")
"""States of Adam and Adafactor that must not be negative: the optimizers take their square roots."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# Saving without torch.distributed is intended. The filter is permanent, since saves run in a thread and `catch_warnings`
# changes the filters of all threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class CpuStager(BlockingAsyncStager):
    """Copies tensors to CPU memory, so that training continues while they are written. Reuses the memory for the next save.

    PyTorch's DefaultStager does the same, but in version 2.11 it can be used only once.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._gpu = device.type == "cuda"
        self._stager = StateDictStager(pin_memory=self._gpu, share_memory=False)
        self._weights: dict[str, Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copied: dict[str, Any] = self._stager.stage(state_dict, non_blocking=self._gpu)
        self._finish()
        return copied

    def weights(self, model: nn.Module, wanted: bool) -> dict[str, Tensor]:
        """Returns copies of the full weights if `wanted` on this process. Collective: all processes must call it."""
        for name, x in full_weights(model):
            if wanted:
                if name not in self._weights:
                    self._weights[name] = torch.empty_like(x, device="cpu", pin_memory=self._gpu)
                self._weights[name].copy_(x, non_blocking=self._gpu)
        self._finish()
        return self._weights

    def close(self) -> None:
        """Frees the memory."""
        self._stager.close()  # type: ignore[no-untyped-call]
        self._weights = {}

    def _finish(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()


class Writer(HuggingFaceStorageWriter):
    """Writes this process's shard. When all processes have written, rank 0 calls `finish`."""

    def __init__(self, folder: Path, finish: Callable[[], None]) -> None:
        super().__init__(str(folder / "state"), save_distributed=True)
        self._finish = finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As the inherited method, but without a copy. A file has the shards and their offsets in the full tensors."""
        tensors, offsets = {}, {}
        for item in plan.items:
            x = planner.resolve_data(item)
            assert isinstance(x, Tensor)
            assert item.tensor_data is not None
            tensors[item.index.fqn] = x
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if tensors:
            path = Path(self.path) / f"part-{plan.storage_data['shard_index']}.safetensors"
            save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._finish()


class Reader:
    """Opens the files of a checkpoint. Reads their headers, but no tensors yet."""

    def __init__(self, folder: Path) -> None:
        self._weights = safe_open(folder / "model.safetensors", framework="pt")
        self._state = HuggingFaceStorageReader(str(folder / "state"))
        self._saved = set(self._state.read_metadata().state_dict_metadata)

    def fill(self, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]) -> None:
        """Loads the checkpoint into model, optimizers and average. Collective: all processes must call it."""
        self._fill_state(model, optimizers, average)
        # Weights come last: creating the optimizers' state takes a step with zero gradients, which may change the rounding.
        wanted = model.state_dict()
        with self._weights as file:
            _check_names(set(file.keys()), wanted.keys())
            for name, x in wanted.items():
                copy_weight(x, file.get_tensor(name), name)

    def _fill_state(self, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]) -> None:
        names = {id(x): name for name, x in model.named_parameters()}
        wanted = {f"average.{name}": x for name, x in average.items()}
        states = []
        for optimizer in optimizers:
            own = {names[id(x)] for group in optimizer.param_groups for x in group["params"]}
            saved = (name.removeprefix("state.") for name in self._saved if name.startswith("state."))
            if any(name.rpartition(".")[0] in own for name in saved):
                state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
                wanted |= _tensors(state)
                states.append((optimizer, state))
        _check_names(self._saved, wanted.keys() | {"step"})
        load_sharded(wanted, storage_reader=self._state, no_dist=not dist.is_initialized())
        for optimizer, state in states:
            state.update({name: wanted[name] for name in state if name in wanted})
            set_optimizer_state_dict(model, optimizer, state, options=FLAT)


def state_tensors(model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the optimizers and the average; of sharded ones, this process's shard."""
    tensors = {f"average.{name}": x for name, x in average.items()}
    for optimizer in optimizers:
        if optimizer.state:  # Otherwise every step was skipped, and get_optimizer_state_dict would create a state.
            state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
            tensors |= _tensors(state)
    return tensors


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of an optimizer's state, without a learning rate that is a tensor."""
    return {name: x for name, x in state.items() if isinstance(x, Tensor) and name.startswith("state.")}


def check_values(
    folder: Path, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]
) -> None:  # fmt: skip
    """Raises ValueError if training cannot go on with what was loaded from `folder`, or with this process's shard of it.

    All values must be finite. Adam and Adafactor take roots of means of squares, and divide by functions of their step.
    """
    for name, x in model.state_dict().items():
        check_finite(folder / "model.safetensors", name, local_tensor(x))
    for name, x in average.items():
        check_finite(folder / "state", f"average.{name}", local_tensor(x))
    names = {id(x): name for name, x in model.named_parameters()}
    for parameter, state in (pair for optimizer in optimizers for pair in optimizer.state.items()):
        count = float(state.get("step", 0))
        if not 0 <= count <= step or count != int(count):  # Also refuses NaN.
            raise ValueError(f"{folder / 'state'}: an optimizer's step must be from 0 to {step}, got {count:g}")
        for kind, x in state.items():
            name, values = f"state.{names[id(parameter)]}.{kind}", local_tensor(torch.as_tensor(x))
            check_finite(folder / "state", name, values)
            if kind in MEAN_SQUARES and values.numel() and float(values.min()) < 0:
                raise ValueError(
                    f"{folder / 'state'}: {name!r} has a value of {float(values.min())}; squares are at least 0"
                )


def first_error(error: BaseException) -> BaseException:
    """Returns the first process's error from a CheckpointException; any other error as it is."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def reason(error: BaseException) -> str:
    """Returns an error's message as one line, without the stack traces that C++ errors append."""
    error = first_error(error)
    lines = str(error).strip().split("\n")
    text = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    return shorten(text, 300, placeholder=" ...") or type(error).__name__


def _check_names(saved: Set[str], wanted: Set[str]) -> None:
    for name in sorted(saved ^ wanted):
        raise LookupError(f"{name} is {'not wanted' if name in saved else 'missing'}")
