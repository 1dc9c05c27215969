"""A run's state as a folder: weights, optimizers' averages, and what else the next step depends on. Nothing is unpickled.

    checkpoints/step-N/model.safetensors    weights, float32
    checkpoints/step-N/state.safetensors    optimizers' tensors, and the weights' running average
    checkpoints/step-N/state.json           numbers: the step, the best validation so far, the loss scale

A folder is written under another name and renamed, so that one that has the name is whole.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

PREFIX = "step-"
VERSION = 1


def save(
    folder: Path, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor],
    progress: dict[str, Any], keep: int,
) -> Path:  # fmt: skip
    """Saves a step's state and removes all but the newest `keep`."""
    final = folder / f"{PREFIX}{step}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    for left in folder.glob(f".{PREFIX}*"):  # Of a process that was killed while it saved.
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors, numbers = _flatten(optimizers)
        tensors |= {f"average.{name}": x for name, x in average.items()}
        _write(temporary / "model.safetensors", model.state_dict())
        _write(temporary / "state.safetensors", tensors)
        content = {"version": VERSION, "step": step, "optimizers": numbers, **progress}
        (temporary / "state.json").write_text(json.dumps(content, indent=2) + "\n")
        for path in (*temporary.iterdir(), temporary):  # On the disk before it has its name: also if the power fails.
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)  # Only a run that began anew after its checkpoints has one.
        os.replace(temporary, final)
        _sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in sorted(_steps(folder))[:-keep]:
        shutil.rmtree(folder / f"{PREFIX}{old}", ignore_errors=True)
    return final


def newest(folder: Path) -> Path | None:
    steps = _steps(folder)
    return folder / f"{PREFIX}{max(steps)}" if steps else None


def load(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]
) -> dict[str, Any]:  # fmt: skip
    """Fills model, optimizers and average with what was saved, and returns the numbers."""
    try:
        content: dict[str, Any] = json.loads((folder / "state.json").read_text())
        weights, state = load_file(folder / "model.safetensors"), load_file(folder / "state.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read: {error}; remove that folder to resume from the one before") from None
    if content.get("version") != VERSION:
        raise ValueError(f"{folder}: version {content.get('version')} of checkpoints is not known, only {VERSION} is")
    try:
        model.load_state_dict(weights)
        for name, x in average.items():
            x.copy_(state.pop(f"average.{name}"))
        _unflatten(optimizers, state, content["optimizers"])
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} is not of this run's model and optimizer: {error}") from None
    return content


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return [int(name) for name in names if name.isdigit()]


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)


def _flatten(optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """Tensors by the name optimizer.parameter.field; other fields, which are plain, by optimizer and parameter."""
    tensors, numbers = {}, []
    for number, optimizer in enumerate(optimizers):
        plain: dict[str, dict[str, Any]] = {}
        for parameter, fields in optimizer.state_dict()["state"].items():
            plain[str(parameter)] = {}
            for name, value in fields.items():
                if isinstance(value, Tensor):
                    tensors[f"{number}.{parameter}.{name}"] = value
                else:
                    plain[str(parameter)][name] = value
        numbers.append(plain)
    return tensors, numbers


def _unflatten(
    optimizers: Sequence[Optimizer], tensors: dict[str, Tensor], numbers: list[dict[str, dict[str, Any]]]
) -> None:
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Any]] = {int(name): dict(fields) for name, fields in numbers[number].items()}
        for name, x in tensors.items():
            owner, parameter, field = name.split(".", 2)
            if int(owner) == number:
                state[int(parameter)][field] = x
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        _keep_dtypes(optimizer, state)


def _keep_dtypes(optimizer: Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """PyTorch casts state to the parameter's dtype when it loads it; what was saved is exact."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for number, fields in saved.items():
        for name, value in fields.items():
            if isinstance(value, Tensor) and value.dtype != optimizer.state[parameters[number]][name].dtype:
                device = optimizer.state[parameters[number]][name].device
                optimizer.state[parameters[number]][name] = value.to(device)
