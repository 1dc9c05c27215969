"""A run's state as folders, by torch.distributed.checkpoint, for any number of processes. Nothing is ever unpickled.

    checkpoints/step-N/model.safetensors     weights, float32, whole
    checkpoints/step-N/state/*.safetensors   optimizers' tensors and the weights' running average, in parts, one a process
    checkpoints/step-N/state.json            numbers: the best validation so far, the loss scale
    checkpoints/step-N/manifest.json         the SHA-256 of each file; written last

To save copies all to the CPU's memory; a thread writes it while training goes on.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_spread
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture
from torch.optim import Optimizer

from longstride.tensor_file import save_file
from longstride.training.distributed import whole
from longstride.training.ranks import Ranks
from longstride.training.sealed import MANIFEST, DamagedError, UnfinishedError, check, is_sealed, seal

PREFIX = "step-"
VERSION = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # It is meant so.


class SaveError(OSError):
    """A checkpoint that could not be written; it says what a run goes on from."""


class Checkpoints:
    """Those of one run. The newest `keep` are kept, and that of the best validation."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self._under_way: Future[Any] | None = None
        self._step = 0
        # Of its own: the thread that writes must not come between the messages of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )  # fmt: skip
        self._stager = DefaultStager(options)

    def save(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor],
        progress: dict[str, Any], best: int | None = None,
    ) -> None:  # fmt: skip
        """Begins to save; `wait` says how it ended. `best` is the step of the best validation."""
        self.wait()
        folder = self.folder / f"{PREFIX}{step}"
        if self.ranks.first:
            self._remove(path for path in self._folders().values() if path == folder or not is_sealed(path))
        gathered = {name: whole(x.detach()) for name, x in model.state_dict().items()}
        weights: dict[str, Tensor] = self._stager.stage(gathered) if self.ranks.first else {}  # type: ignore[assignment]
        # As text, since training goes on with what is in it.
        numbers = json.dumps({"version": VERSION, "step": step, **progress}, indent=2) + "\n"

        def finish() -> None:
            save_file(weights, folder / "model.safetensors")
            (folder / "state.json").write_text(numbers)
            seal(folder)
            self._forget_old(best)

        self.ranks.wait()  # Until what was left there is removed.
        self._step = step
        self._under_way = async_save(  # type: ignore[assignment]
            {"step": torch.tensor(step), **_tensors(model, optimizers, average)},
            storage_writer=_Writer(folder, finish),
            async_stager=self._stager,
            process_group=self._group,
            no_dist=not dist.is_initialized(),
        )

    @property
    def failed(self) -> bool:
        """Whether what was begun has ended, and badly. It does not wait."""
        ended = self._under_way is not None and self._under_way.done()
        return ended and self._under_way.exception() is not None  # type: ignore[union-attr]

    def wait(self) -> None:
        """Until what was begun is written. If it could not be, an error says why, and the ones before are as they were."""
        if self._under_way is None:
            return
        error = self._under_way.exception()
        self._under_way = None
        if error is None:
            return
        folder = self.folder / f"{PREFIX}{self._step}"
        if self.ranks.first:
            self._remove([folder])
        found = SaveError(f"train: {folder} could not be written: {_reason(error)}; {self.way_on()}")
        # PyTorch tells all processes of an error that one has. What else there is, one alone has, as when others have ended.
        raise (self.ranks.said(found) if isinstance(error, CheckpointException) else found) from (
            error if self.ranks.lost(error) else None
        )

    def way_on(self) -> str:
        """For messages: what a run that had to stop goes on from."""
        steps = sorted(step for step, path in self._folders().items() if is_sealed(path))
        return f"{PREFIX}{steps[-1]} is whole, and --resume goes on from it" if steps else "no checkpoint was written before"

    def newest(self, say: Callable[[str], None]) -> int | None:
        """The step of the last good one; `say` is told of those that are not good. None if there never was a whole one."""
        bad, folders = [], self._folders()
        for step, folder in sorted(folders.items(), reverse=True):
            then = "the one before it is used" if step > min(folders) else "there is none before it"
            try:
                check(folder)
                return step
            except UnfinishedError as error:
                say(f"{error}; {then}")
            except DamagedError as error:
                bad.append(str(error))
                say(f"{error}; {then}")
        if bad:
            raise ValueError(
                f"train: no checkpoint in {self.folder} can be used: {'; '.join(bad)}. "
                "Bring one back from a copy, or remove that folder to begin anew."
            )
        return None

    def set_aside(self, step: int) -> None:
        """What is newer than `step`, which is gone on from: unfinished ones are removed, and damaged ones get another name.

        If `step` is -1 there is none to go on from, and unfinished ones are kept so, too: perhaps only a manifest was lost.
        """
        for number, folder in self._folders().items():
            if number > step and (step < 0 or is_sealed(folder)):
                aside = folder.with_name(f"{'damaged' if is_sealed(folder) else 'unfinished'}-{folder.name}")
                self._remove([aside])
                folder.rename(aside)
            elif number > step:
                self._remove([folder])

    def load(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]
    ) -> dict[str, Any]:  # fmt: skip
        """Fills model, optimizers and average with what was saved, and returns the numbers."""
        folder = self.folder / f"{PREFIX}{step}"
        numbers, weights, reader, saved = self.ranks.together(lambda: self._read(folder, step))
        try:
            _fill(reader, saved, model, optimizers, average)
            _compare(weights.keys(), model.state_dict().keys())  # PyTorch would leave those that are missing as they are.
            # The last, since optimizers make their state by a step that changes nothing, but for its rounding.
            set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        except (LookupError, RuntimeError, ValueError, CheckpointException) as error:
            if isinstance(_first(error), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise ValueError(f"{folder} is not of this run's model and optimizer: {_reason(error)}") from None
        return numbers

    @staticmethod
    def _read(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, Any], HuggingFaceStorageReader, set[str]]:
        """Numbers, weights, and what reads the state, with the names that it has."""
        try:
            numbers: dict[str, Any] = json.loads((folder / "state.json").read_text())
            weights: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
            if not isinstance(numbers, dict):
                raise ValueError("state.json has no names")
            if numbers.get("version") != VERSION:
                found = f"version {numbers.get('version')!r} of checkpoints is not known, only {VERSION} is"
                raise ValueError(found)
            if numbers.get("step") != step:
                raise ValueError(f"it is of step {numbers.get('step')!r}, whatever its name says")
            reader = HuggingFaceStorageReader(str(folder / "state"))
            return numbers, weights, reader, set(reader.read_metadata().state_dict_metadata)
        except Exception as error:  # Of any kind: who wrote these files may have meant harm.
            raise ValueError(f"{folder} cannot be read: {_reason(error)}") from None

    def _folders(self) -> dict[int, Path]:
        names = {path.name.removeprefix(PREFIX): path for path in self.folder.glob(f"{PREFIX}*") if path.is_dir()}
        return {int(name): path for name, path in names.items() if name.isdecimal() and name == str(int(name))}

    def _forget_old(self, best: int | None) -> None:
        steps = sorted(self._folders())
        self._remove(self.folder / f"{PREFIX}{step}" for step in steps[: -self.keep] if step != best)

    @staticmethod
    def _remove(folders: Iterable[Path]) -> None:
        for folder in folders:
            with suppress(OSError):  # First: what is left of it must not look damaged.
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


class _Writer(HuggingFaceStorageWriter):
    """Each process writes its part; when all have, the first one calls `finish`."""

    def __init__(self, folder: Path, finish: Callable[[], None]) -> None:
        super().__init__(str(folder / "state"), save_distributed=True)
        self._finish = finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """As the one that is inherited, but for copying: a part is the tensors, and where each lies in the whole one."""
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
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._finish()


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {f"average.{name}": x for name, x in average.items()}
    for optimizer in optimizers:
        if optimizer.state:  # Else every step so far was skipped; to ask would make one.
            state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
            found |= {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return found


def _fill(
    reader: HuggingFaceStorageReader, saved: set[str], model: nn.Module, optimizers: Sequence[Optimizer],
    average: dict[str, Tensor],
) -> None:  # fmt: skip
    names = {id(x): name for name, x in model.named_parameters()}
    wanted = {f"average.{name}": x for name, x in average.items()}
    states = []
    for optimizer in optimizers:
        own = {names[id(x)] for group in optimizer.param_groups for x in group["params"]}
        if any(name.removeprefix("state.").rpartition(".")[0] in own for name in saved if name.startswith("state.")):
            state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
            wanted |= {name: x for name, x in state.items() if isinstance(x, Tensor)}
            states.append((optimizer, state))
    _compare(saved, wanted.keys() | {"step"})
    load_spread(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    for optimizer, state in states:
        state.update({name: wanted[name] for name in state if name in wanted})
        set_optimizer_state_dict(model, optimizer, state, options=FLAT)


def _compare(saved: Set[str], wanted: Set[str]) -> None:
    for name in sorted(saved ^ wanted):
        raise LookupError(f"{name} is {'not wanted' if name in saved else 'missing'}")


def _first(error: BaseException) -> BaseException:
    """Of a checkpoint's error, which has those of all processes, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _reason(error: BaseException) -> str:
    """In one line. Of several the first, and what it announces; those of C++ go on with where they come from."""
    error = _first(error)
    lines = str(error).strip().split("\n")
    text = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    return shorten(text, 300, placeholder=" ...") or type(error).__name__
