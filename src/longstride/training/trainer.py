"""train(config): the loop of section 6, from a store of bytes to a run's folder.

A step is a pure function of the weights, the optimizer's state, the seed and the step's number: batches and dropout both
are. So a run that is resumed goes on with the same bits as one that never stopped.
"""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite, log
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from longstride.checks import whole_number
from longstride.data.loader import Prefetch, Sequences
from longstride.data.prepare import open_data
from longstride.data.store import Store
from longstride.model import SparseTransformer
from longstride.model.cost import check_memory
from longstride.model.pretrained import save_weights
from longstride.standard import StandardError
from longstride.training.checkpoint import Checkpoints, SaveError
from longstride.training.config import TrainConfig
from longstride.training.curve import plot_curve
from longstride.training.distributed import Spread, averaging_dtype, whole_weights
from longstride.training.interrupts import Interrupts
from longstride.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from longstride.training.precision import Updates
from longstride.training.progress import Reporter, check_tensorboard
from longstride.training.ranks import ALONE, Ranks, joined
from longstride.training.run import Run, read_metrics
from longstride.training.samples import write_samples
from longstride.training.speed import Speed, matrix_rate
from longstride.training.validation import validate

Say = Callable[[str], None]
DONE, INTERRUPTED = "all steps are done", "interrupted"


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: Path
    step: int
    bits_per_byte: float | None
    """Of the last logged training steps."""
    valid_bits_per_byte: float | None
    """Of the last validation; the best one's weights are kept."""
    best_bits_per_byte: float | None
    best_step: int | None
    seconds: float
    bytes_per_second: float
    loader_share: float
    """Of the time, how much was spent waiting for data."""
    reason: str
    done: bool
    """Whether there is nothing left to do; else `resume` goes on."""


class Trainer:
    """A run that is under way: what it has, and what its next step does."""

    def __init__(self, config: TrainConfig, resume: bool, ranks: Ranks = ALONE, say: Say = print) -> None:
        self.config, self.ranks = config, ranks
        ranks.together(lambda: _check(config, ranks))
        self.device = ranks.together(lambda: ranks.device(config.device))
        shares = ranks.count if config.parallel == "fsdp" else 1
        ranks.together(lambda: check_memory(config.model, self.device, shares))
        self.averaging = ranks.together(lambda: averaging_dtype(config.averaging, config.model.precision, self.device))
        self.run = ranks.together(lambda: Run.resumed(config) if resume else Run.new(config))
        try:
            self._begin(resume, say)
        except BaseException:
            self.run.unlock()
            raise

    def _begin(self, resume: bool, say: Say) -> None:
        """Nothing is written before all that can be wrong was looked at."""
        config, ranks = self.config, self.ranks
        if resume:
            ranks.first_does(self.run.lock)
        self.store = ranks.first_on_each_machine(lambda: open_data(config.data))
        ranks.together(lambda: self._take_data(resume))

        torch.manual_seed(config.seed)
        self.model = SparseTransformer(config.model)
        if config.compile:
            for block in self.model.blocks:
                block.compile()
        self.rows = config.batch // ranks.count // config.accumulate
        """Sequences that a process computes at a time."""
        self.spread = Spread(self.model, self.device, ranks, config.parallel, self.averaging, self.rows)
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.updates = Updates(self.model, self.optimizers, config.model.precision, config.optimizer.clip, self.device)
        self.average = {name: x.detach().clone() for name, x in self.model.named_parameters()} if config.ema else {}
        self.checkpoints = Checkpoints(self.run.checkpoints, config.keep, ranks, self.device)
        self.step = 0
        self.losses: list[float] = []
        """Of the steps since the last line of metrics."""
        self.best: float | None = None
        self.best_step: int | None = None
        self.without_better = 0
        self.saved = 0
        """The step of the last checkpoint. At 0 there is nothing to save that a new run would not have."""
        if resume:
            self._resume(say)
        ranks.wait()  # All have looked at the folder as it was.
        ranks.first_does(lambda: self.run.begin(config, self.store))

    def _take_data(self, resume: bool) -> None:
        config, context, item = self.config, self.config.model.context, self.store.item_bytes
        _fits(self.store, config)
        if resume:
            self.run.check_data(self.store)
        self.training = Sequences(self.store.split("train"), context, item, f"{config.data} (train)")
        self.held_out = Sequences(self.store.split("valid"), context, item, f"{config.data} (valid)")
        self.fixed = self.held_out.spread(max(1, config.validate_bytes // context))

    def _resume(self, say: Say) -> None:
        found = self.ranks.first_does(lambda: self.checkpoints.newest(say))
        step = self.ranks.most(-1 if found is None else found)
        if step >= 0:  # Else it stopped before its first one, and begins anew.
            state = self.checkpoints.load(step, self.model, self.optimizers, self.average)
            self.step = self.saved = step
            try:
                self.best, self.best_step = state["best"], state["best_step"]
                self.without_better, self.losses = int(state["without_better"]), [float(loss) for loss in state["losses"]]
                self.updates.load_state(state["scaler"])
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ValueError(f"train: state.json of step-{step} is not of such a run: {error!r}") from None
        self.ranks.first_does(lambda: self.checkpoints.set_aside(step))
        self.ranks.first_does(lambda: self.run.forget_after(self.step))

    def save(self) -> None:
        """Begins to write a checkpoint of this step; `checkpoints.wait` says how that ended."""
        if self.saved == self.step:
            return
        progress = {
            "best": self.best,
            "best_step": self.best_step,
            "without_better": self.without_better,
            "losses": self.losses,
            "scaler": self.updates.state(),
        }
        self.checkpoints.save(self.step, self.model, self.optimizers, self.average, progress, self.best_step)
        self.saved = self.step

    def close(self) -> None:
        """Others may have the folder when nothing more is written to it; who interrupts twice does not wait for that."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            with suppress(OSError):
                self.checkpoints.wait()
            self.checkpoints.close()
        self.run.unlock()

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.without_better

    def take_step(self, tokens: Tensor) -> dict[str, Any]:
        """One step, and what it found. Raises before the weights change if something is not finite and should be."""
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
            # Young averages follow the weights closely: what they began with is forgotten soon.
            kept = min(config.ema, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                for name, x in self.model.named_parameters():
                    self.average[name].lerp_(x, 1 - kept)
        self.step += 1
        if isfinite(loss):
            self.losses.append(loss)
        return {"learning_rate": rate, "gradient_norm": norm, "skipped": int(not changed)}

    def validate(self) -> float:
        """Bits per byte; better weights than before are kept as the run's."""
        with self._averaged():
            bits = validate(self.model, self.held_out, self.fixed, self.rows, self.ranks) / log(2)
            if isfinite(bits) and (self.best is None or bits < self.best):
                self.best, self.best_step, self.without_better = bits, self.step, 0
                weights = {name: x.cpu() for name, x in whole_weights(self.model) if self.ranks.first}
                self.ranks.first_does(lambda: save_weights(self.run.folder, weights))
            else:
                self.without_better += 1
        return bits

    def finish(self, say: Say) -> None:
        """Samples of the data and of what the model makes of it, and the curve; a run without them is still a run."""
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
        """The model with its average weights, if it has them, while the context lasts."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """In place: a spread model knows its weights by where they lie."""
        if self.spread.fsdp:  # A pass without a backward one leaves some of them together.
            self.model.reshard()  # type: ignore[operator]
        for name, x in self.model.named_parameters():
            if self.average:
                held = x.clone()
                x.copy_(self.average[name])
                self.average[name].copy_(held)


def train(
    config: TrainConfig, resume: bool = False, until: int | None = None, console: Console | None = None
) -> Summary:  # fmt: skip
    """Trains, and returns how it ended. `until`: pauses after that step, as Ctrl-C does; `resume` goes on from there.

    Processes that torchrun has started train one model together; all return the same.
    """
    end = config.steps if until is None else min(whole_number("train", "until", until, 1), config.steps)
    if config.tensorboard:
        check_tensorboard()
    with joined(config.device) as ranks:
        # A run that these processes had begun, before one was lost; not one that was there already.
        begun = ranks.first_does(lambda: ranks.restarted and Run.is_of_this_launch(config))
        resume = ranks.any(resume or bool(begun))
        return _train(config, resume, end, ranks, console)


def _train(config: TrainConfig, resume: bool, end: int, ranks: Ranks, console: Console | None) -> Summary:
    if not ranks.first:
        console = Console(file=io.StringIO())
    console = console or StandardError()
    with closing(
        Trainer(config, resume, ranks, partial(console.print, highlight=False, soft_wrap=True, markup=False))
    ) as trainer:
        rate = matrix_rate(trainer.device, getattr(torch, config.model.precision))
        speed = Speed(config, rate, trainer.device, ranks.count)
        first, shown = trainer.step, config.tensorboard and ranks.first
        reporter = ranks.together(lambda: Reporter(config.steps, first, trainer.run.folder, shown, console))
        batches = Prefetch(
            trainer.training, config.seed, config.batch, first, end, trainer.device, ranks.rank, ranks.count
        )  # fmt: skip
        with batches, reporter, Interrupts(ranks.first) as interrupts:
            try:
                interrupted = _loop(trainer, batches, reporter, speed, interrupts)
                trainer.save()
                trainer.checkpoints.wait()
            except FloatingPointError as error:
                trainer.save()
                trainer.checkpoints.wait()
                ranks.said(error)
                raise
            except (OSError, RuntimeError) as error:
                if interrupts.asked and ranks.lost(error):  # Somebody asked them twice.
                    raise KeyboardInterrupt from None
                if isinstance(error, SaveError) or not isinstance(error, OSError):
                    raise
                with suppress(OSError):  # Then it is not what the message names.
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
        rows = read_metrics(trainer.run.folder) if trainer.run.metrics.exists() else []
        return Summary(
            folder=trainer.run.folder,
            step=trainer.step,
            bits_per_byte=_last(rows, "bits_per_byte"),
            valid_bits_per_byte=_last(rows, "valid_bits_per_byte"),
            best_bits_per_byte=trainer.best,
            best_step=trainer.best_step,
            seconds=seconds,
            bytes_per_second=(trainer.step - first) * config.batch * config.model.context / seconds,
            loader_share=batches.waited / seconds,
            reason=reason,
            done=trainer.out_of_patience or trainer.step == config.steps,
        )


def _loop(trainer: Trainer, batches: Prefetch, reporter: Reporter, speed: Speed, interrupts: Interrupts) -> bool:
    """Steps until the batches end, validation no longer improves, or a signal comes: then it is true."""
    config, ranks = trainer.config, trainer.ranks
    for tokens in () if trainer.out_of_patience else batches:
        found = trainer.take_step(tokens)
        speed.steps += 1
        reporter.advance(trainer.step)
        last = trainer.step == config.steps
        validated = trainer.step % config.validate_every == 0 or last
        if trainer.step % config.log_every == 0 or validated:
            row = {**_losses(trainer), **found, **speed.row(trainer.step, batches.waited)}
            if trainer.updates.scale is not None:
                row["loss_scale"] = trainer.updates.scale
            if validated:
                row["valid_bits_per_byte"] = trainer.validate()
            ranks.first_does(partial(_note, trainer.run, reporter, row))
            trainer.losses = []
            speed.restart(batches.waited)
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


def _losses(trainer: Trainer) -> dict[str, Any]:
    loss = sum(trainer.losses) / len(trainer.losses) if trainer.losses else float("nan")
    return {"step": trainer.step, "loss": loss, "bits_per_byte": loss / log(2)}


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def _mixed(seed: int, step: int, rank: int) -> int:
    """Another number for every step of every seed and rank, as a generator's seed."""
    return ((seed * 1_000_003 + step + 1) * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03) % 2**63


def _check(config: TrainConfig, ranks: Ranks) -> None:
    if not config.data:
        raise ValueError("train: --data must be given: a prepared store, or files to make one of")
    if config.out and Path(config.data).resolve() in (Path(config.out).resolve(), *Path(config.out).resolve().parents):
        raise ValueError(f"train: --out {config.out} lies in --data {config.data}, and would become data; give another")
    if config.parallel == "fsdp" and config.optimizer.name == "adafactor" and ranks.count > 1:
        raise ValueError("train: PyTorch's Adafactor cannot work on parts of weights; use --parallel ddp, or adamw or muon")
    if config.batch % (ranks.count * config.accumulate):
        raise ValueError(
            f"train: batch = {config.batch} must be a multiple of {ranks.count} processes times "
            f"accumulate = {config.accumulate}"
        )


def _fits(store: Store, config: TrainConfig) -> None:
    """Images must be those that the model's embedding has rows, columns and channels for."""
    positions = config.model.positions
    if store.item and len(positions.sizes) == 3 and tuple(store.item) != tuple(positions.sizes):
        have, want = " x ".join(map(str, store.item)), " x ".join(map(str, positions.sizes))
        raise ValueError(
            f"train: {config.data} has images of {have}, and the model's embedding is for {want}; "
            f"give --model.embedding 'image({', '.join(map(str, store.item))})' and --model.context {store.item_bytes}"
        )
