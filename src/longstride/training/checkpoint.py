"""Checkpoints of a run, with torch.distributed.checkpoint, for any number of processes. Nothing is unpickled.

    checkpoints/step-N/model.safetensors     weights, float32, unsharded
    checkpoints/step-N/state/*.safetensors   optimizers' tensors and the weights' running average, one shard per process
    checkpoints/step-N/state.json            the run's id, the best validation so far, the loss scale
    checkpoints/step-N/manifest.json         the SHA-256 of each file; written last

Saving copies all tensors to CPU memory; a thread writes them while training continues.
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
from longstride.training.checkpoint_files import CpuStager, Reader, Writer, check_values, first_error, reason, state_tensors
from longstride.training.manifest import (
    MANIFEST,
    DamagedError,
    UnfinishedError,
    check_manifest,
    has_manifest,
    write_manifest,
)
from longstride.training.ranks import Ranks

PREFIX = "step-"
VERSION = 2
DIGITS = 19
"""A step has fewer digits than this: it fits a 64-bit integer."""


class SaveError(OSError):
    """A checkpoint could not be written. The message names the one to resume from."""


class Checkpoints:
    """The checkpoints of one run. Keeps the newest `keep` and that of the best validation."""

    def __init__(
        self, folder: Path, keep: int, ranks: Ranks, device: torch.device, run_id: str | None = None
    ) -> None:  # fmt: skip
        """`device`: the device of the tensors. `run_id`: the id of the run; None for runs of earlier versions."""
        self.folder, self.keep, self.ranks, self.run_id = folder, keep, ranks, run_id
        self._pending_save: Future[Any] | None = None
        self._step = 0
        # A separate group: the writing thread must not interleave with the collectives of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._stager = CpuStager(device)

    def save(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor],
        progress: dict[str, Any], best: int | None = None,
    ) -> None:  # fmt: skip
        """Starts to save; `wait` raises if that fails. `best`: the step of the best validation."""
        self.wait()
        folder = self.folder / f"{PREFIX}{step}"
        if self.ranks.is_main:
            self._remove(path for path in self._folders().values() if path == folder or not has_manifest(path))
        weights = self._stager.weights(model, self.ranks.is_main)
        # Serialized now, since training changes `progress`.
        owner = {} if self.run_id is None else {"run": self.run_id}
        state_text = json.dumps({"version": VERSION, "step": step, **owner, **progress}, indent=2) + "\n"

        def finish() -> None:
            save_file(weights, folder / "model.safetensors")
            (folder / "state.json").write_text(state_text)
            write_manifest(folder)
            self._forget_old(best)

        self.ranks.wait()  # Wait until rank 0 has removed old folders.
        self._step = step
        self._pending_save = async_save(  # type: ignore[assignment]
            {"step": torch.tensor(step), **state_tensors(model, optimizers, average)},
            storage_writer=Writer(folder, finish),
            async_stager=self._stager,
            process_group=self._group,
            no_dist=not dist.is_initialized(),
        )

    @property
    def failed(self) -> bool:
        """Whether the current save has failed. Does not wait for it."""
        ended = self._pending_save is not None and self._pending_save.done()
        return ended and self._pending_save.exception() is not None  # type: ignore[union-attr]

    def wait(self) -> None:
        """Waits until the current save is complete. Raises SaveError if it failed; earlier checkpoints are unaffected."""
        if self._pending_save is None:
            return
        error = self._pending_save.exception()
        self._pending_save = None
        if error is None:
            return
        folder = self.folder / f"{PREFIX}{self._step}"
        if self.ranks.is_main:
            self._remove([folder])
        failure = SaveError(f"train: {folder} could not be written: {reason(error)}; {self.resume_hint()}")
        # A CheckpointException is raised on all processes; any other error on one, for example when others have ended.
        raise (self.ranks.mark_reported(failure) if isinstance(error, CheckpointException) else failure) from (
            error if self.ranks.is_peer_failure(error) else None
        )

    def resume_hint(self) -> str:
        """Returns a sentence for messages: the checkpoint that a stopped run can be resumed from."""
        steps = sorted(step for step, path in self._folders().items() if has_manifest(path))
        return f"{PREFIX}{steps[-1]} is whole, and --resume goes on from it" if steps else "no checkpoint was written before"

    def newest(self, say: Callable[[str], None]) -> int | None:
        """Returns the step of the newest intact checkpoint; None if there are only unfinished ones. `say` gets the problems.

        ValueError if some are damaged and none is intact.
        """
        bad, folders = [], self._folders()
        for step, folder in sorted(folders.items(), reverse=True):
            then = "the one before it is used" if step > min(folders) else "there is none before it"
            try:
                check_manifest(folder)
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
        """Handles checkpoints newer than `step`, the one to resume: removes unfinished ones and renames damaged ones.

        With step -1, if there is none to resume, it renames unfinished ones too: perhaps only the manifest was lost.
        """
        for number, folder in self._folders().items():
            if number > step and (step < 0 or has_manifest(folder)):
                aside = folder.with_name(f"{'damaged' if has_manifest(folder) else 'unfinished'}-{folder.name}")
                self._remove([aside])
                folder.rename(aside)
            elif number > step:
                self._remove([folder])

    def load(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer], average: dict[str, Tensor]
    ) -> dict[str, Any]:  # fmt: skip
        """Loads a checkpoint into model, optimizers and average, and returns the content of state.json."""
        folder = self.folder / f"{PREFIX}{step}"
        state, reader = self.ranks.run_on_all(lambda: self._read(folder, step))
        try:
            reader.fill(model, optimizers, average)
        except (LookupError, RuntimeError, ValueError, CheckpointException) as error:
            if isinstance(first_error(error), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise ValueError(f"{folder} is not of this run's model and optimizer: {reason(error)}") from None
        self.ranks.run_on_all(lambda: check_values(folder, step, model, optimizers, average))
        return state

    def close(self) -> None:
        """Frees memory. Call it when no save is running and none will follow."""
        self._stager.close()

    def _read(self, folder: Path, step: int) -> tuple[dict[str, Any], Reader]:
        check_owner(folder, self.run_id)
        try:
            state = read_json(folder / "state.json")
            if state.get("version") != VERSION:
                message = f"version {state.get('version')!r} of checkpoints is not known, only {VERSION} is"
                raise ValueError(message)
            if state.get("step") != step:
                raise ValueError(f"its state.json is of step {state.get('step')!r}, not {step}")
            return state, Reader(folder)
        except Exception as error:  # Any kind: the files are untrusted.
            raise ValueError(f"{folder} cannot be read: {reason(error)}") from None

    def _folders(self) -> dict[int, Path]:
        return _folders(self.folder)

    def _forget_old(self, best: int | None) -> None:
        steps = sorted(self._folders())
        self._remove(self.folder / f"{PREFIX}{step}" for step in steps[: -self.keep] if step != best)

    @staticmethod
    def _remove(folders: Iterable[Path]) -> None:
        for folder in folders:
            if folder.is_symlink():  # Its target is not part of the run.
                continue
            with suppress(OSError):  # First, so that a half-removed folder counts as unfinished, not damaged.
                (folder / MANIFEST).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the newest finished checkpoint in a folder of checkpoints; None if there is none."""
    finished = {step: path for step, path in _folders(folder).items() if has_manifest(path)}
    return finished[max(finished)] if finished else None


def _folders(folder: Path) -> dict[int, Path]:
    folders = (path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink())
    names = {path.name.removeprefix(PREFIX): path for path in folders}
    steps = (name for name in names if name.isdecimal() and len(name) < DIGITS and name == str(int(name)))
    return {int(name): names[name] for name in steps}


def check_owner(folder: Path, run_id: str | None) -> None:
    """Raises ValueError if a checkpoint belongs to another run. Runs of earlier versions have no id."""
    try:
        owner_id = read_json(folder / "state.json").get("run")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} cannot be read: {reason(error)}") from None
    if owner_id != run_id:
        theirs = f"the run {owner_id[:40]!r}" if isinstance(owner_id, str) else "a run without an id"
        ours = f"is {run_id!r}" if run_id is not None else "has none (run.json is missing)"
        raise ValueError(f"{folder} is of {theirs}, and this run {ours}; remove that checkpoint, or restore the run's files")
