"""A run's state as folders, by torch.distributed.checkpoint, for any number of processes. Nothing is ever unpickled.

    checkpoints/step-N/model.safetensors     weights, float32, whole
    checkpoints/step-N/state/*.safetensors   optimizers' tensors and the weights' running average, in parts, one a process
    checkpoints/step-N/state.json            whose it is; numbers: the best validation so far, the loss scale
    checkpoints/step-N/manifest.json         the SHA-256 of each file; written last

To save copies all to the CPU's memory; a thread writes it while training goes on.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from longstride.common.files import read_json
from longstride.common.tensor_file import save_file
from longstride.training.ranks import Ranks
from longstride.training.sealed import MANIFEST, DamagedError, UnfinishedError, check, is_sealed, seal
from longstride.training.state import Copies, Reader, Writer, check_counts, first_error, reason, state_tensors

PREFIX = "step-"
VERSION = 2
DIGITS = 19
"""Of a step's number there are fewer: it fits a 64-bit integer."""


class SaveError(OSError):
    """A checkpoint that could not be written; it says what a run goes on from."""


class Checkpoints:
    """Those of one run. The newest `keep` are kept, and that of the best validation."""

    def __init__(
        self, folder: Path, keep: int, ranks: Ranks, device: torch.device, run_id: str | None = None
    ) -> None:  # fmt: skip
        """`device`: where that is which is saved. `run_id`: of the run that they belong to, if it has one."""
        self.folder, self.keep, self.ranks, self.run_id = folder, keep, ranks, run_id
        self._under_way: Future[Any] | None = None
        self._step = 0
        # Of its own: the thread that writes must not come between the messages of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._copies = Copies(device)

    def save(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor],
        progress: dict[str, Any], best: int | None = None,
    ) -> None:  # fmt: skip
        """Begins to save; `wait` says how it ended. `best` is the step of the best validation."""
        self.wait()
        folder = self.folder / f"{PREFIX}{step}"
        if self.ranks.first:
            self._remove(path for path in self._folders().values() if path == folder or not is_sealed(path))
        weights = self._copies.weights(model, self.ranks.first)
        # As text, since training goes on with what is in it.
        owner = {} if self.run_id is None else {"run": self.run_id}
        numbers = json.dumps({"version": VERSION, "step": step, **owner, **progress}, indent=2) + "\n"

        def finish() -> None:
            save_file(weights, folder / "model.safetensors")
            (folder / "state.json").write_text(numbers)
            seal(folder)
            self._forget_old(best)

        self.ranks.wait()  # Until what was left there is removed.
        self._step = step
        self._under_way = async_save(  # type: ignore[assignment]
            {"step": torch.tensor(step), **state_tensors(model, optimizers, average)},
            storage_writer=Writer(folder, finish),
            async_stager=self._copies,
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
        found = SaveError(f"train: {folder} could not be written: {reason(error)}; {self.way_on()}")
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
                "Bring one back from a copy, or give another --out for a new run."
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
        numbers, reader = self.ranks.together(lambda: self._read(folder, step))
        try:
            reader.fill(model, optimizers, average)
            check_counts(optimizers, step)
        except (LookupError, RuntimeError, ValueError, CheckpointException) as error:
            if isinstance(first_error(error), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise ValueError(f"{folder} is not of this run's model and optimizer: {reason(error)}") from None
        return numbers

    def close(self) -> None:
        """When nothing is under way, and nothing will be saved any more."""
        self._copies.close()

    def _read(self, folder: Path, step: int) -> tuple[dict[str, Any], Reader]:
        check_owner(folder, self.run_id)
        try:
            numbers = read_json(folder / "state.json")
            if numbers.get("version") != VERSION:
                found = f"version {numbers.get('version')!r} of checkpoints is not known, only {VERSION} is"
                raise ValueError(found)
            if numbers.get("step") != step:
                raise ValueError(f"it is of step {numbers.get('step')!r}, whatever its name says")
            return numbers, Reader(folder)
        except Exception as error:  # Of any kind: who wrote these files may have meant harm.
            raise ValueError(f"{folder} cannot be read: {reason(error)}") from None

    def _folders(self) -> dict[int, Path]:
        found = (path for path in self.folder.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink())
        names = {path.name.removeprefix(PREFIX): path for path in found}
        numbers = (name for name in names if name.isdecimal() and len(name) < DIGITS and name == str(int(name)))
        return {int(name): names[name] for name in numbers}

    def _forget_old(self, best: int | None) -> None:
        steps = sorted(self._folders())
        self._remove(self.folder / f"{PREFIX}{step}" for step in steps[: -self.keep] if step != best)

    @staticmethod
    def _remove(folders: Iterable[Path]) -> None:
        for folder in folders:
            if folder.is_symlink():  # What it leads to is not ours.
                continue
            with suppress(OSError):  # First: what is left of it must not look damaged.
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def check_owner(folder: Path, run_id: str | None) -> None:
    """Raises ValueError if a checkpoint belongs to another run. Runs of earlier versions have no id, nor have theirs."""
    try:
        found = read_json(folder / "state.json").get("run")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} cannot be read: {reason(error)}") from None
    if found != run_id:
        theirs = f"the run {found[:40]!r}" if isinstance(found, str) else "a run without an id"
        ours = f"is {run_id!r}" if run_id is not None else "has none (run.json is missing)"
        raise ValueError(
            f"{folder} is of {theirs}, and this run {ours}; remove that checkpoint, or bring back what belongs here"
        )
