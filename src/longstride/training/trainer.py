"""Trainer: a run in progress, with its training step, validation and checkpoints (section 6 of the paper).

A step is a pure function of the weights, the optimizer's state, the seed and the step number; so are batches and dropout.
A resumed run is therefore bit-identical to one that never stopped.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from math import isfinite, log
from typing import Any

import torch
from torch import Tensor

from longstride.data.loader import Sequences
from longstride.model import SparseTransformer
from longstride.model.cost import check_memory
from longstride.model.recompute import IN_PARTS
from longstride.training import capture, first_step
from longstride.training.averaging import averaging_dtype
from longstride.training.budget import validation_batch
from longstride.training.checkpoint import Checkpoints
from longstride.training.config import Resume, TrainConfig
from longstride.training.curve import plot_curve
from longstride.training.distributed import ParallelModel, full_weights, local_tensor
from longstride.training.initial_weights import InitialWeights
from longstride.training.optimizer import can_skip_on_device, describe_extension, learning_rate, make_optimizers
from longstride.training.precision import Updates
from longstride.training.preflight import check_settings, check_training_data, open_verified
from longstride.training.ranks import SINGLE_RANK, Ranks
from longstride.training.run import WEIGHTS, Run
from longstride.training.run_state import RunState
from longstride.training.validation import validate, write_samples

Say = Callable[[str], None]
"""Prints a line for the user."""


class Trainer:
    """A run in progress: model, optimizers, data, and the training step."""

    def __init__(
        self, config: TrainConfig, resume: Resume, ranks: Ranks = SINGLE_RANK, say: Say = print, preset: str = ""
    ) -> None:
        """`resume`: continue the run that exists; with "auto", a run without a checkpoint may start again from step 0."""
        self.config, self.ranks, self.preset = config, ranks, preset
        ranks.run_on_all(lambda: check_settings(config, ranks))
        self.device = ranks.run_on_all(lambda: ranks.device(config.device))
        shares = ranks.count if config.parallel == "fsdp" else 1
        ranks.run_on_all(lambda: check_memory(config.model, self.device, shares))
        self.plain_because = ranks.run_on_all(lambda: capture.choose(config, self.device, ranks))
        """Why steps are not captured; None if they are."""
        self.averaging = ranks.run_on_all(lambda: averaging_dtype(config.averaging, config.model.precision, self.device))
        self.run = ranks.run_on_all(lambda: (Run.resumed if resume else Run.new)(config, preset))
        try:
            self._begin(resume, say)
        except BaseException:
            self.run.unlock()
            raise

    def _begin(self, resume: Resume, say: Say) -> None:
        """Loads data, model and state. Writes nothing before all checks have passed."""
        config, ranks = self.config, self.ranks
        if resume:
            ranks.run_on_first(self.run.lock)
        self.store = ranks.run_first_per_machine(lambda: open_verified(config.data, ranks))
        ranks.run_on_all(lambda: self._open_data(resume))

        torch.manual_seed(config.seed)
        self.model = SparseTransformer(config.model)
        if config.compile:
            for block, choice in zip(self.model.blocks, config.model.recomputed):
                if choice not in IN_PARTS:
                    block.compile()
        self.rows = config.batch // ranks.count // config.accumulate
        """Sequences per forward pass of a process."""
        self.validation_rows = -ranks.maximum(-validation_batch(config, self.device, ranks.count))
        captured = self.plain_because is None
        self.parallel = ParallelModel(
            self.model, self.device, ranks, config.parallel, self.averaging, self.rows, captured
        )  # fmt: skip
        same_weights = SINGLE_RANK if self.parallel.fsdp else ranks
        self.optimizers = make_optimizers(self.model, config.optimizer, ranks=same_weights)
        waits = not can_skip_on_device(self.optimizers)
        clip = config.optimizer.clip
        self.updates = Updates(self.model, self.optimizers, config.model.precision, clip, self.device, waits)
        self.average = {name: x.detach().clone() for name, x in self.model.named_parameters()} if config.ema else {}
        self.average_weight = torch.zeros((), device=self.device)
        """Weight of a step's weights in the average."""
        self.compute: Callable[[Tensor], Tensor] = self._compute
        if captured:
            report = say if config.capture == "auto" else None
            self.compute = capture.CapturedStep(self._compute, self.optimizers, self.device, report)
        self.compiles_first = first_step.compiles_first(config, self.device, ranks.count > 1 and not captured)
        """Whether the next step is the first, and its kernels are compiled before it."""
        if self.device.type == "cuda":
            why = "" if self.plain_because is None else f": {self.plain_because}"
            say(f"steps run {'without a' if why else 'as one'} CUDA graph{why}")
        self.unread: list[StepValues] = []
        """Values of the steps that have been started, and not been read yet."""
        self.step_metrics: dict[str, Any] = {}
        """Metrics of the last step that has been read."""
        self.checkpoints = Checkpoints(self.run.checkpoints, config.keep, ranks, self.device, self.run.id)
        self.step = 0
        self.run_state = RunState()
        self.has_checkpoint = False
        """Whether a complete checkpoint is on the disk."""
        self.unwritten_best: dict[str, Tensor] | None = None
        """The best weights so far, until there is a checkpoint and they may be written."""
        self.saved_step = 0
        """The step of the last checkpoint. Step 0 needs none."""
        if resume:
            self._resume(resume == "auto", say)
        if config.init_from and not self.step:
            self._load_initial_weights(say)
        if self.run.steps_before is not None:
            rates = describe_extension(config.optimizer, self.step, self.run.steps_before, config.steps)
            say(f"{self.run.folder} is extended {rates}")
            self.run_state.without_better = 0  # Patience begins anew.
        ranks.wait()  # All processes have read the folder before it changes.
        ranks.run_on_first(lambda: self.run.begin(config, self.store))

    def _open_data(self, resume: Resume) -> None:
        config, context, item = self.config, self.config.model.context, self.store.item_bytes
        check_training_data(self.store, config, "" if resume else self.preset)
        if resume:
            self.run.check_data(self.store)
        self.training = Sequences(self.store.split("train"), context, item, f"{config.data} (train)")
        self.held_out = Sequences(self.store.split("valid"), context, item, f"{config.data} (valid)")
        self.validation_starts = self.held_out.spread(max(1, config.validate_bytes // context))

    def _resume(self, may_begin_anew: bool, say: Say) -> None:
        newest = self.ranks.run_on_first(lambda: self.checkpoints.newest(say))
        step = self.ranks.maximum(-1 if newest is None else newest)
        if step >= 0:
            state = self.checkpoints.load(step, self.model, self.optimizers, self.average)
            self.ranks.run_on_all(lambda: self._restore_state(state, step))
            self._restore_best(step)
        self.ranks.run_on_first(lambda: self.run.prepare_resume(step, may_begin_anew, say))
        self.ranks.run_on_first(lambda: self.checkpoints.set_aside(step))

    def _restore_best(self, step: int) -> None:
        """Writes the file of the best weights again if it cannot be read and they are those of this step.

        The process may have been killed between the first checkpoint and that file.
        """
        best = self.run_state.best_step
        problem = self.ranks.run_on_first(self.run.weights_problem) if best is not None else None
        if not self.ranks.any(problem is not None):
            return
        if best == step:
            with self._with_average_weights():
                self._write_best(self._weights())
            return
        self.ranks.run_on_first(lambda: self._refuse_lost_best(str(problem)))

    def _refuse_lost_best(self, problem: str) -> None:
        path, copy = self.run.folder / WEIGHTS, self.run.checkpoints / f"step-{self.run_state.best_step}" / WEIGHTS
        has_copy = copy.is_file() and not self.config.ema  # A checkpoint has the weights, not their average, in that file.
        fix = f"copy {copy} there" if has_copy else "bring it back from a copy, or give another --out for a new run"
        raise ValueError(f"train: {path}, the best weights of the run, cannot be read: {problem}; {fix}")

    def _load_initial_weights(self, say: Say) -> None:
        initial = self.ranks.run_on_all(lambda: InitialWeights(self.config.init_from, self.config.model))
        self.ranks.run_on_all(lambda: self.run.record_initial_weights(initial.record))
        initial.fill(self.model)
        for name, x in self.model.named_parameters():
            if self.average:
                self.average[name].copy_(x.detach())
        say(f"{self.run.folder} begins from the weights of {initial.record['path']}")

    def _restore_state(self, state: dict[str, Any], step: int) -> None:
        owner = f"train: {self.run.checkpoints / f'step-{step}' / 'state.json'}"
        if step > self.config.steps:
            raise ValueError(f"{owner}: step must be at most the run's {self.config.steps} steps, got {step}")
        self.run_state = RunState.read(state, step, owner)
        try:
            self.updates.load_state(state.get("scaler"))
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        self.step, self.saved_step, self.has_checkpoint = step, step, True

    def save(self) -> None:
        """Starts to write a checkpoint of this step; `checkpoints.wait` raises if it fails."""
        self.finish_steps()
        if self.saved_step == self.step:
            return
        progress = asdict(self.run_state) | {"scaler": self.updates.state()}
        best = self.run_state.best_step
        self.checkpoints.save(self.step, self.model, self.optimizers, self.average, progress, best)
        self.saved_step = self.step

    def close(self) -> None:
        """Unlocks the folder once nothing is written to it any more. Does not wait after a second interrupt."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            with suppress(OSError):
                self.checkpoints.wait()
            self.checkpoints.close()
        self.compute = self._compute  # A graph with collectives is freed before the process group.
        self.parallel.close()
        self.run.unlock()

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.run_state.without_better

    def take_step(self, tokens: Tensor) -> None:
        """Starts a step, and then reads the values of the one before: the GPU always has work.

        FloatingPointError if a value of that step was not finite. Neither it nor the one just started changes the weights,
        and `step` counts neither.
        """
        config = self.config
        if self.compiles_first:
            self.compiles_first = False
            part = tokens.chunk(config.accumulate)[0]
            with self.compute.on_own_stream() if isinstance(self.compute, capture.CapturedStep) else nullcontext():
                first_step.compile_kernels(self.model, lambda: self.updates.backward(self.parallel.loss(part)))
        torch.manual_seed(_step_seed(config.seed, self.step, self.ranks.rank))
        rate = learning_rate(config.optimizer, self.step, config.steps)
        self.updates.set_learning_rate(rate)
        if self.average:
            # A smaller decay in early steps, so that the initial weights are forgotten soon.
            self.average_weight.fill_(1 - min(config.ema, (1 + self.step) / (10 + self.step)))
        values = self.compute(tokens)
        self.step += 1
        self.unread.append(StepValues(self.step, rate, values))
        while len(self.unread) > 1:
            self._read_step()

    def _compute(self, tokens: Tensor) -> Tensor:
        """Computes a step on the device, without a wait for its result: loss, gradient norm, whether the step was skipped,
        loss scale, and whether training must stop."""
        accumulate = self.config.accumulate
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(tokens.chunk(accumulate), 1):
            with self.parallel.gradient_averaging(number == accumulate):
                nats = self.parallel.loss(part)
                self.updates.backward(nats / accumulate)
            total += nats.detach() / accumulate
        self.parallel.average()
        loss = self.ranks.mean(total)
        norm, skipped = self.updates.update(loss)
        weight = self.average_weight * ~skipped
        with torch.no_grad():
            for name, x in self.model.named_parameters() if self.average else ():
                local_tensor(self.average[name]).lerp_(local_tensor(x), weight)
        scale = loss if self.updates.loss_scale is None else self.updates.loss_scale.value
        return torch.stack([loss, norm, skipped.float(), scale, self.updates.stopped.float()])

    def finish_steps(self) -> dict[str, Any]:
        """Waits for the steps that have been started, and returns the metrics of the last. Raises as `take_step` does."""
        while self.unread:
            self._read_step()
        return self.step_metrics

    def _read_step(self) -> None:
        values = self.unread.pop(0)
        loss, norm, skipped, scale, stopped = values.read()
        if stopped:
            self.unread.clear()
            self.updates.stopped.zero_()
            self.step = values.step - 1
            starts = self.training.starts(self.config.seed, self.step, self.config.batch)
            raise FloatingPointError(
                f"train: step {values.step} has a loss of {loss} and a gradient of norm {norm}; the weights are as they "
                f"were before it. Its batch is the bytes of {self.config.data} (train) from {', '.join(map(str, starts))} "
                "on. A new run with a smaller learning rate, or a longer warm-up, may do better."
            )
        if isfinite(loss):
            self.run_state.losses.append(loss)
        self.run_state.skipped += int(skipped)
        self.step_metrics = {"learning_rate": values.rate, "gradient_norm": norm, "skipped": int(skipped)}
        if self.updates.loss_scale is not None:
            self.step_metrics["loss_scale"] = scale

    def validate(self) -> float:
        """Returns the bits per byte of the validation data, and keeps the weights if they are the best so far."""
        with self._with_average_weights():
            bits = validate(self.model, self.held_out, self.validation_starts, self.validation_rows, self.ranks) / log(2)
            now = self.run_state
            if isfinite(bits) and (now.best is None or bits < now.best):
                now.best, now.best_step, now.without_better = bits, self.step, 0
                if self.has_checkpoint:
                    self._write_best(self._weights())
                else:
                    self.unwritten_best = self._weights()
            else:
                now.without_better += 1
        return bits

    def write_unwritten_best(self) -> None:
        """Writes the first best weights, after a checkpoint: a run with a weights file can always be resumed."""
        if self.unwritten_best is not None:
            if not self.saved_step:
                self.save()
            self.checkpoints.wait()
            self._write_best(self.unwritten_best)
            self.has_checkpoint, self.unwritten_best = True, None

    def _weights(self) -> dict[str, Tensor]:
        """Returns copies of the full weights on rank 0. Collective: all processes must call it."""
        return {name: x.to("cpu", copy=True) for name, x in full_weights(self.model) if self.ranks.is_main}

    def _write_best(self, weights: dict[str, Tensor]) -> None:
        best, step = self.run_state.best, self.run_state.best_step
        assert best is not None
        assert step is not None
        self.ranks.run_on_first(lambda: self.run.keep_best(weights, step, best))

    def finish(self, say: Say) -> None:
        """Writes samples of the data and of the predictions, and the loss curve. A failure is reported, not raised."""
        try:
            with self._with_average_weights():
                folder = self.run.folder if self.ranks.is_main else None
                write_samples(folder, self.store, self.model, self.held_out, self.device)
            if self.ranks.is_main:
                plot_curve(self.run.folder)
        except (ValueError, ModuleNotFoundError, OSError) as error:
            say(f"training is complete, but pictures or samples could not be written: {error}")

    @contextmanager
    def _with_average_weights(self) -> Iterator[None]:
        """Context in which the model has its average weights, if there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges weights and average, in place: FSDP keeps references to the weights' storage."""
        if self.parallel.fsdp:  # A forward pass without backward leaves some weights gathered.
            self.model.reshard()  # type: ignore[operator]
        for name, x in self.model.named_parameters():
            if self.average:
                held = x.clone()
                x.copy_(self.average[name])
                self.average[name].copy_(held)


class StepValues:
    """The metrics of a step, while they are copied from the device to the host."""

    def __init__(self, step: int, rate: float, values: Tensor) -> None:
        self.step, self.rate = step, rate
        # A copy, as the next step of a CUDA graph overwrites the values.
        self._values = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda).copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[float]:
        """Waits until the step has been computed."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values


def _step_seed(seed: int, step: int, rank: int) -> int:
    """Returns a generator seed that differs for every seed, step and rank."""
    return ((seed * 1_000_003 + step + 1) * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03) % 2**63
