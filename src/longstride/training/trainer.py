"""train(config): the loop of section 6, from a store of bytes to a run's folder.

A step is a pure function of the weights, the optimizer's state, the seed and the step number; so are batches and dropout.
A resumed run is therefore bit-identical to one that never stopped.
"""

import io
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from math import isfinite, log
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from longstride.common.checks import whole_number
from longstride.common.console import StandardError
from longstride.data.loader import Prefetch, Sequences
from longstride.model import SparseTransformer
from longstride.model.cost import check_memory
from longstride.training.checkpoint import Checkpoints, SaveError
from longstride.training.config import TrainConfig
from longstride.training.curve import plot_curve
from longstride.training.distributed import Spread, averaging_dtype, whole_weights
from longstride.training.fitting import check_kind, fit_to_data
from longstride.training.initial import Initial
from longstride.training.interrupts import Interrupts
from longstride.training.optimizer import describe_extension, learning_rate, make_optimizers, set_learning_rate
from longstride.training.precision import Updates
from longstride.training.preflight import check_settings, open_verified
from longstride.training.progress import Reporter, check_tensorboard
from longstride.training.ranks import ALONE, Ranks, joined
from longstride.training.run import WEIGHTS, Resume, Run, check_resume
from longstride.training.samples import write_samples
from longstride.training.speed import Speed, matrix_rate
from longstride.training.standing import Standing
from longstride.training.summary import Summary as Summary
from longstride.training.validation import validate

Say = Callable[[str], None]
DONE, INTERRUPTED = "all steps are done", "interrupted"


class Trainer:
    """A run in progress: model, optimizers, data, and the training step."""

    def __init__(
        self, config: TrainConfig, resume: Resume, ranks: Ranks = ALONE, say: Say = print, preset: str = ""
    ) -> None:
        """`resume`: the run exists; "auto": one without a checkpoint may start again from step 0."""
        self.config, self.ranks, self.preset = config, ranks, preset
        ranks.run_on_all(lambda: check_settings(config, ranks))
        self.device = ranks.run_on_all(lambda: ranks.device(config.device))
        shares = ranks.count if config.parallel == "fsdp" else 1
        ranks.run_on_all(lambda: check_memory(config.model, self.device, shares))
        self.averaging = ranks.run_on_all(lambda: averaging_dtype(config.averaging, config.model.precision, self.device))
        self.run = ranks.run_on_all(lambda: Run.resumed(config) if resume else Run.new(config))
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
        ranks.run_on_all(lambda: self._take_data(resume))

        torch.manual_seed(config.seed)
        self.model = SparseTransformer(config.model)
        if config.compile:
            for block in self.model.blocks:
                block.compile()
        self.rows = config.batch // ranks.count // config.accumulate
        """Sequences per forward pass of a process."""
        self.spread = Spread(self.model, self.device, ranks, config.parallel, self.averaging, self.rows)
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.updates = Updates(self.model, self.optimizers, config.model.precision, config.optimizer.clip, self.device)
        self.average = {name: x.detach().clone() for name, x in self.model.named_parameters()} if config.ema else {}
        self.checkpoints = Checkpoints(self.run.checkpoints, config.keep, ranks, self.device, self.run.id)
        self.step = 0
        self.standing = Standing()
        self.whole = False
        """Whether there is a checkpoint on the disk."""
        self.first_best: dict[str, Tensor] | None = None
        """The first best weights, until there is a checkpoint."""
        self.saved = 0
        """The step of the last checkpoint. Step 0 needs none."""
        if resume:
            self._resume(resume == "auto", say)
        if config.init_from and not self.step:
            self._take_initial_weights(say)
        if self.run.steps_before is not None:
            rates = describe_extension(config.optimizer, self.step, self.run.steps_before, config.steps)
            say(f"{self.run.folder} is extended {rates}")
            self.standing.without_better = 0  # Patience begins anew.
        ranks.wait()  # All processes have read the folder before it changes.
        ranks.run_on_first(lambda: self.run.begin(config, self.store))

    def _take_data(self, resume: Resume) -> None:
        config, context, item = self.config, self.config.model.context, self.store.item_bytes
        check_kind(self.store, config, self.preset)
        if resume:
            self.run.check_data(self.store)
        self.training = Sequences(self.store.split("train"), context, item, f"{config.data} (train)")
        self.held_out = Sequences(self.store.split("valid"), context, item, f"{config.data} (valid)")
        self.fixed = self.held_out.spread(max(1, config.validate_bytes // context))

    def _resume(self, may_begin_anew: bool, say: Say) -> None:
        found = self.ranks.run_on_first(lambda: self.checkpoints.newest(say))
        step = self.ranks.most(-1 if found is None else found)
        if step >= 0:
            state = self.checkpoints.load(step, self.model, self.optimizers, self.average)
            self.ranks.run_on_all(lambda: self._take_state(state, step))
            # The process may have been killed between the first checkpoint and its weights file, which has the same weights.
            unwritten = self.standing.best_step == step and not (self.run.folder / WEIGHTS).exists()
            if self.ranks.any(self.ranks.first and unwritten):
                with self._averaged():
                    self._write_best(self._weights())
        self.ranks.run_on_first(lambda: self.run.go_back(step, may_begin_anew, say))
        self.ranks.run_on_first(lambda: self.checkpoints.set_aside(step))

    def _take_initial_weights(self, say: Say) -> None:
        initial = self.ranks.run_on_all(lambda: Initial(self.config.init_from, self.config.model))
        self.ranks.run_on_all(lambda: self.run.take_initial(initial.record))
        initial.fill(self.model)
        for name, x in self.model.named_parameters():
            if self.average:
                self.average[name].copy_(x.detach())
        say(f"{self.run.folder} begins from the weights of {initial.record['path']}")

    def _take_state(self, state: dict[str, Any], step: int) -> None:
        owner = f"train: {self.run.checkpoints / f'step-{step}' / 'state.json'}"
        if step > self.config.steps:
            raise ValueError(f"{owner}: step must be at most the run's {self.config.steps} steps, got {step}")
        self.standing = Standing.read(state, step, owner)
        try:
            self.updates.load_state(state.get("scaler"))
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        self.step, self.saved, self.whole = step, step, True

    def save(self) -> None:
        """Starts to write a checkpoint of this step; `checkpoints.wait` raises if it fails."""
        if self.saved == self.step:
            return
        progress = asdict(self.standing) | {"scaler": self.updates.state()}
        best = self.standing.best_step
        self.checkpoints.save(self.step, self.model, self.optimizers, self.average, progress, best)
        self.saved = self.step

    def close(self) -> None:
        """Unlocks the folder once nothing is written to it any more. Does not wait after a second interrupt."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            with suppress(OSError):
                self.checkpoints.wait()
            self.checkpoints.close()
        self.spread.close()
        self.run.unlock()

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.standing.without_better

    def take_step(self, tokens: Tensor) -> dict[str, Any]:
        """Runs one step and returns its metrics. FloatingPointError, before the weights change, if a value is not finite."""
        config = self.config
        torch.manual_seed(_mixed(config.seed, self.step, self.ranks.rank))
        rate = learning_rate(config.optimizer, self.step, config.steps)
        set_learning_rate(self.optimizers, rate)
        total = torch.zeros((), device=self.device)
        for number, part in enumerate(tokens.chunk(config.accumulate), 1):
            with self.spread.averaged(number == config.accumulate):
                nats = self.spread.loss(part)
                self.updates.backward(nats / config.accumulate)
            total += nats.detach() / config.accumulate
        loss = float(self.ranks.mean(total))
        norm, changed = self.updates.update(loss)
        if not changed and not self.updates.may_skip:
            starts = self.training.starts(config.seed, self.step, config.batch)
            raise FloatingPointError(
                f"train: step {self.step + 1} has a loss of {loss} and a gradient of norm {norm}; the weights are as they "
                f"were before it. Its batch is the bytes of {config.data} (train) from {', '.join(map(str, starts))} on. "
                "A new run with a smaller learning rate, or a longer warm-up, may do better."
            )
        if self.average and changed:
            # A smaller decay in early steps, so that the initial weights are forgotten soon.
            kept = min(config.ema, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                for name, x in self.model.named_parameters():
                    self.average[name].lerp_(x, 1 - kept)
        self.step += 1
        if isfinite(loss):
            self.standing.losses.append(loss)
        return {"learning_rate": rate, "gradient_norm": norm, "skipped": int(not changed)}

    def validate(self) -> float:
        """Returns the bits per byte of the validation data, and keeps the weights if they are the best so far."""
        with self._averaged():
            bits = validate(self.model, self.held_out, self.fixed, self.rows, self.ranks) / log(2)
            now = self.standing
            if isfinite(bits) and (now.best is None or bits < now.best):
                now.best, now.best_step, now.without_better = bits, self.step, 0
                if self.whole:
                    self._write_best(self._weights())
                else:
                    self.first_best = self._weights()
            else:
                now.without_better += 1
        return bits

    def write_first_best(self) -> None:
        """Writes the first best weights after a checkpoint, so that a run with weights can always be resumed."""
        if self.first_best is not None:
            if not self.saved:
                self.save()
            self.checkpoints.wait()
            self._write_best(self.first_best)
            self.whole, self.first_best = True, None

    def _weights(self) -> dict[str, Tensor]:
        """Returns copies of the full weights on rank 0. Collective: all processes must call it."""
        return {name: x.to("cpu", copy=True) for name, x in whole_weights(self.model) if self.ranks.first}

    def _write_best(self, weights: dict[str, Tensor]) -> None:
        best, step = self.standing.best, self.standing.best_step
        assert best is not None
        assert step is not None
        self.ranks.run_on_first(lambda: self.run.keep_best(weights, step, best))

    def finish(self, say: Say) -> None:
        """Writes samples of the data and of the predictions, and the loss curve. A failure is reported, not raised."""
        try:
            with self._averaged():
                folder = self.run.folder if self.ranks.first else None
                write_samples(folder, self.store, self.model, self.held_out, self.device)
            if self.ranks.first:
                plot_curve(self.run.folder)
        except (ValueError, ModuleNotFoundError, OSError) as error:
            say(f"the run is whole, but for its pictures and samples: {error}")

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context in which the model has its average weights, if there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges weights and average, in place: FSDP keeps references to the weights' storage."""
        if self.spread.fsdp:  # A forward pass without backward leaves some weights gathered.
            self.model.reshard()  # type: ignore[operator]
        for name, x in self.model.named_parameters():
            if self.average:
                held = x.clone()
                x.copy_(self.average[name])
                self.average[name].copy_(held)


def train(
    config: TrainConfig, resume: Resume = False, until: int | None = None, console: Console | None = None,
    fit: Collection[str] = (), preset: str = "",
) -> Summary:  # fmt: skip
    """Trains, and returns how it ended. `until`: pauses after that step, as Ctrl-C does; `resume` goes on from there.

    A run that is resumed with more `steps` than it began with, finished or not, is extended: each further step has the
    learning rate that it would have in a run of the new total, so that of a finished run rises again and then decays to the
    new end. All other settings that a step depends on must be the run's own.

    resume="auto" is for batch systems that start a job again: it begins a run that is not there, and goes on with one that
    is. One that never came to a checkpoint begins anew, and its metrics are kept under another name until it has caught up.
    Processes that torchrun has started train one model together; all return the same.

    fit: of the model's context, embedding and pattern those that follow from the data, if that has images of another size.
    preset: the name of the preset that the config was made from; data of another kind than the preset's is refused.
    """
    end = config.steps if until is None else min(whole_number("train", "until", until, 1), config.steps)
    check_resume(resume)
    if config.tensorboard:
        check_tensorboard()
    with joined(config.device) as ranks:
        # After a restart by torchrun, resume the run that this launch began, but no run that existed before.
        begun = ranks.run_on_first(lambda: ranks.restarted and Run.is_of_this_launch(config))
        if ranks.any(bool(begun)):
            resume = "auto"
        elif resume == "auto":
            resume = "auto" if ranks.any(bool(ranks.run_on_first(lambda: Run.is_there(config)))) else False
        return _train(config, resume, end, ranks, console, fit, preset)


def _train(
    config: TrainConfig, resume: Resume, end: int, ranks: Ranks, console: Console | None, fit: Collection[str], preset: str
) -> Summary:  # fmt: skip
    console = (console or StandardError()) if ranks.first else Console(file=io.StringIO())
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    config = fit_to_data(config, fit, resume, ranks, say)
    with closing(Trainer(config, resume, ranks, say, preset)) as trainer:
        rate = matrix_rate(trainer.device, getattr(torch, config.model.precision))
        speed = Speed(config, rate, trainer.device, ranks.count)
        first, shown = trainer.step, config.tensorboard and ranks.first
        reporter = ranks.run_on_all(lambda: Reporter(config.steps, first, trainer.run.folder, shown, console))
        batches = Prefetch(trainer.training, config.seed, config.batch, first, end, trainer.device, ranks.rank, ranks.count)
        with batches, reporter, Interrupts(ranks.first) as interrupts:
            try:
                interrupted = _loop(trainer, batches, reporter, speed, interrupts)
                trainer.save()
                trainer.checkpoints.wait()
            except FloatingPointError as error:
                trainer.save()
                trainer.checkpoints.wait()
                ranks.mark_reported(error)
                raise
            except (OSError, RuntimeError) as error:
                if interrupts.asked and ranks.is_peer_failure(error):  # A second signal ended the other processes.
                    raise KeyboardInterrupt from None
                if isinstance(error, SaveError) or not isinstance(error, OSError):
                    raise
                with suppress(OSError):  # Another failure of the save is not the one to report.
                    trainer.checkpoints.wait()
                full = OSError(f"train: step {trainer.step}: {error}; {trainer.checkpoints.way_on()}")
                full.__notes__ = getattr(error, "__notes__", [])
                raise full from None
            reason = DONE
            if trainer.out_of_patience:
                reason = f"no better validation in {config.patience} of them"
            elif trainer.step < config.steps:
                reason = INTERRUPTED if interrupted else f"paused after step {trainer.step}"
            if trainer.out_of_patience or trainer.step == config.steps:
                trainer.finish(reporter.say)
        seconds = perf_counter() - speed.begun
        last = trainer.run.metrics.last_values("bits_per_byte", "valid_bits_per_byte")
        return Summary(
            folder=trainer.run.folder,
            step=trainer.step,
            bits_per_byte=last.get("bits_per_byte"),
            valid_bits_per_byte=last.get("valid_bits_per_byte"),
            best_bits_per_byte=trainer.standing.best,
            best_step=trainer.standing.best_step,
            seconds=seconds,
            bytes_per_second=(trainer.step - first) * config.batch * config.model.context / seconds,
            loader_share=batches.waited / seconds,
            reason=reason,
            done=trainer.out_of_patience or trainer.step == config.steps,
            signal=interrupts.signal if reason == INTERRUPTED else None,
        )


def _loop(trainer: Trainer, batches: Prefetch, reporter: Reporter, speed: Speed, interrupts: Interrupts) -> bool:
    """Trains until the batches end, validation no longer improves, or a signal comes. Returns True for a signal."""
    config, ranks = trainer.config, trainer.ranks
    for tokens in () if trainer.out_of_patience else batches:
        found = trainer.take_step(tokens)
        speed.steps += 1
        reporter.advance(trainer.step)
        last = trainer.step == config.steps
        validated = trainer.step % config.validate_every == 0 or last
        if trainer.step % config.log_every == 0 or validated:
            row = {**trainer.standing.loss_row(trainer.step), **found, **speed.row(trainer.step, batches.waited)}
            if trainer.updates.scale is not None:
                row["loss_scale"] = trainer.updates.scale
            if validated:
                row["valid_bits_per_byte"] = trainer.validate()
            ranks.run_on_first(partial(_note, trainer.run, reporter, row))
            trainer.standing.losses = []
            speed.restart(batches.waited)
            trainer.write_first_best()
        if trainer.step % config.save_every == 0 or last:
            trainer.save()
        flags = ranks.most(2 * trainer.checkpoints.failed + interrupts.asked)
        if flags >= 2:
            trainer.checkpoints.wait()
        if flags:
            interrupts.hear()
        if trainer.out_of_patience:
            return False
        if flags and not last:
            return True
    return False


def _note(run: Run, reporter: Reporter, row: dict[str, Any]) -> None:
    run.log(row)
    reporter.row(row)


def _mixed(seed: int, step: int, rank: int) -> int:
    """Returns a generator seed that differs for every seed, step and rank."""
    return ((seed * 1_000_003 + step + 1) * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03) % 2**63
