"""train(config): the loop of section 6, from a store of bytes to a run's folder.

A step is a pure function of the weights, the optimizer's state, the seed and the step's number: batches and dropout both
are. So a run that is resumed goes on with the same bits as one that never stopped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from longstride.device import choose_device
from longstride.model import SparseTransformer
from longstride.model.cost import step_flops
from longstride.model.pretrained import save_weights
from longstride.training import checkpoint
from longstride.training.config import TrainConfig
from longstride.training.curve import plot_curve
from longstride.training.interrupts import Interrupts
from longstride.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from longstride.training.precision import Updates
from longstride.training.progress import Reporter, check_tensorboard
from longstride.training.run import Run, read_metrics
from longstride.training.samples import write_samples
from longstride.training.speed import matrix_rate, memory
from longstride.training.validation import validate

GIB = 2**30
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


class Trainer:
    """A run that is under way: what it has, and what its next step does."""

    def __init__(self, config: TrainConfig, resume: bool) -> None:
        self.config = config
        if not config.data:
            raise ValueError("train: --data must be given: a prepared store, or files to make one of")
        if config.out and Path(config.data).resolve() in (Path(config.out).resolve(), *Path(config.out).resolve().parents):
            raise ValueError(f"train: --out {config.out} lies in --data {config.data}, and would become data; give another")
        self.device = choose_device("train", config.device)
        self.run = Run.resumed(config) if resume else Run.new(config)
        self.store = open_data(config.data)
        _fits(self.store, config)
        if resume:
            self.run.check_data(self.store)
        context, item = config.model.context, self.store.item_bytes
        self.training = Sequences(self.store.split("train"), context, item, f"{config.data} (train)")
        self.held_out = Sequences(self.store.split("valid"), context, item, f"{config.data} (valid)")
        self.fixed = self.held_out.spread(max(1, config.validate_bytes // context))

        torch.manual_seed(config.seed)
        self.model = SparseTransformer(config.model).to(self.device)
        if config.compile:
            for block in self.model.blocks:
                block.compile()
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.updates = Updates(self.model, self.optimizers, config.model.precision, config.optimizer.clip, self.device)
        self.average = {name: x.detach().clone() for name, x in self.model.named_parameters()} if config.ema else {}
        self.step = 0
        self.losses: list[float] = []
        """Of the steps since the last line of metrics."""
        self.best: float | None = None
        self.best_step: int | None = None
        self.without_better = 0
        self.saved: int | None = None
        if resume:
            self._resume()
        self.run.begin(config, self.store)

    def _resume(self) -> None:
        folder = checkpoint.newest(self.run.checkpoints)
        if folder is not None:  # Else it stopped before its first one, and begins anew.
            state = checkpoint.load(folder, self.model, self.optimizers, self.average)
            self.step = self.saved = state["step"]
            self.best, self.best_step = state["best"], state["best_step"]
            self.without_better, self.losses = state["without_better"], state["losses"]
            self.updates.load_state(state["scaler"])
        self.run.forget_after(self.step)

    def save(self) -> None:
        if self.saved == self.step:
            return
        progress = {
            "best": self.best,
            "best_step": self.best_step,
            "without_better": self.without_better,
            "losses": self.losses,
            "scaler": self.updates.state(),
        }
        checkpoint.save(
            self.run.checkpoints, self.step, self.model, self.optimizers, self.average, progress, self.config.keep
        )  # fmt: skip
        self.saved = self.step

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.config.patience <= self.without_better

    def take_step(self, tokens: Tensor) -> dict[str, Any]:
        """One step, and what it found. Raises before the weights change if something is not finite and should be."""
        config = self.config
        torch.manual_seed(_mixed(config.seed, self.step))
        rate = learning_rate(config.optimizer, self.step, config.steps)
        set_learning_rate(self.optimizers, rate)
        total = torch.zeros((), device=self.device)
        for part in tokens.chunk(config.accumulate):
            nats = self.model.loss(part)
            self.updates.backward(nats / config.accumulate)
            total += nats.detach() / config.accumulate
        loss = float(total)
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
        together = max(1, self.config.batch // self.config.accumulate)
        with self._averaged():
            bits = validate(self.model, self.held_out, self.fixed, together, self.device) / log(2)
            if isfinite(bits) and (self.best is None or bits < self.best):
                self.best, self.best_step, self.without_better = bits, self.step, 0
                save_weights(self.run.folder, self.model.state_dict())
            else:
                self.without_better += 1
        return bits

    def finish(self, say: Any) -> None:
        """Samples of the data and of what the model makes of it, and the curve; a run without them is still a run."""
        try:
            with self._averaged():
                write_samples(self.run.folder, self.store, self.model, self.held_out, self.device)
            plot_curve(self.run.folder)
        except (ValueError, ModuleNotFoundError) as error:
            say(f"the run is whole, but for its pictures and samples: {error}")

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The model with its average weights, if it has them, while the context lasts."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, x in self.model.named_parameters():
            if self.average:
                x.data, self.average[name] = self.average[name], x.data


def train(
    config: TrainConfig, resume: bool = False, until: int | None = None, console: Console | None = None
) -> Summary:  # fmt: skip
    """Trains, and returns how it ended. `until`: pauses after that step, as Ctrl-C does; `resume` goes on from there."""
    end = config.steps if until is None else min(whole_number("train", "until", until, 1), config.steps)
    if config.tensorboard:
        check_tensorboard()
    trainer = Trainer(config, resume)
    rate = matrix_rate(trainer.device, getattr(torch, config.model.precision))
    speed = _Speed(config, rate, trainer.device)
    first = trainer.step
    reason = DONE
    batches = Prefetch(trainer.training, config.seed, config.batch, first, end, trainer.device)
    reporter = Reporter(config.steps, first, trainer.run.folder, config.tensorboard, console)
    with batches, reporter, Interrupts() as interrupts:
        try:
            for tokens in () if trainer.out_of_patience else batches:
                found = trainer.take_step(tokens)
                speed.steps += 1
                reporter.advance(trainer.step)
                last = trainer.step == config.steps
                validated = trainer.step % config.validate_every == 0 or last
                if trainer.step % config.log_every == 0 or validated:
                    row = {**_losses(trainer), **found, **speed.row(trainer, batches.waited)}
                    if validated:
                        row["valid_bits_per_byte"] = trainer.validate()
                    trainer.run.log(row)
                    reporter.row(row)
                    trainer.losses = []
                    speed.restart(batches.waited)
                if trainer.step % config.save_every == 0 or last:
                    trainer.save()
                if trainer.out_of_patience:
                    break
                if interrupts.asked and not last:
                    reason = INTERRUPTED
                    break
        except FloatingPointError:
            trainer.save()
            raise
        trainer.save()
        if trainer.out_of_patience:
            reason = f"no better validation in {config.patience} of them"
        elif trainer.step < config.steps and reason == DONE:
            reason = f"paused after step {trainer.step}"
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
    )


class _Speed:
    """How fast the steps since the last line of metrics were."""

    def __init__(self, config: TrainConfig, rate: float | None, device: torch.device) -> None:
        self.config, self.rate, self.device = config, rate, device
        self.flops = config.batch * step_flops(config.model)
        self.begun = perf_counter()
        self.restart(0.0)

    def restart(self, waited: float) -> None:
        self.since, self.waited, self.steps = perf_counter(), waited, 0

    def row(self, trainer: Trainer, waited: float) -> dict[str, Any]:
        seconds = perf_counter() - self.since
        each = seconds / self.steps
        found: dict[str, Any] = {
            "bytes_per_second": self.config.batch * self.config.model.context / each,
            "seconds_per_step": each,
            "seconds_left": each * (self.config.steps - trainer.step),
            "loader_share": (waited - self.waited) / seconds,
        }
        if self.rate is not None:
            found["matrix_share"] = self.flops / each / self.rate
        used = memory(self.device)
        if used is not None:
            found["memory_gib"] = used / GIB
        if trainer.updates.scale is not None:
            found["loss_scale"] = trainer.updates.scale
        return found


def _losses(trainer: Trainer) -> dict[str, Any]:
    loss = sum(trainer.losses) / len(trainer.losses) if trainer.losses else float("nan")
    return {"step": trainer.step, "loss": loss, "bits_per_byte": loss / log(2)}


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def _mixed(seed: int, step: int) -> int:
    """Another number for every step of every seed, as a generator's seed."""
    return (seed * 1_000_003 + step + 1) * 0x9E3779B97F4A7C15 % 2**63


def _fits(store: Store, config: TrainConfig) -> None:
    """Images must be those that the model's embedding has rows, columns and channels for."""
    positions = config.model.positions
    if store.item and len(positions.sizes) == 3 and tuple(store.item) != tuple(positions.sizes):
        have, want = " x ".join(map(str, store.item)), " x ".join(map(str, positions.sizes))
        raise ValueError(
            f"train: {config.data} has images of {have}, and the model's embedding is for {want}; "
            f"give --model.embedding 'image({', '.join(map(str, store.item))})' and --model.context {store.item_bytes}"
        )
