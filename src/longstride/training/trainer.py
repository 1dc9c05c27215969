"""train(config): the loop of section 6, from a store of bytes to a run's folder.

A step is a pure function of the weights, the optimizer's state, the seed and the step's number: batches and dropout both
are. So a run that is resumed goes on with the same bits as one that never stopped.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from longstride.data.loader import Prefetch, Sequences
from longstride.data.prepare import open_data
from longstride.data.store import Store
from longstride.model import SparseTransformer
from longstride.model.cost import step_flops
from longstride.training import checkpoint
from longstride.training.config import TrainConfig
from longstride.training.interrupts import Interrupts
from longstride.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from longstride.training.precision import Steps
from longstride.training.progress import Reporter
from longstride.training.run import Run
from longstride.training.samples import write_samples
from longstride.training.speed import matrix_rate, memory
from longstride.training.validation import validate

GIB = 2**30
DONE = "all steps are done"


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: Path
    step: int
    bits_per_byte: float
    """Of the last logged training steps."""
    valid_bits_per_byte: float | None
    """Of the last validation; the best one's weights are kept."""
    best_bits_per_byte: float | None
    best_step: int | None
    seconds: float
    loader_share: float
    """Of the time, how much was spent waiting for data."""
    reason: str


class Trainer:
    """A run that is under way: what it has, and what its next step does."""

    def __init__(self, config: TrainConfig, resume: bool) -> None:
        self.config = config
        self.device = _device(config.device)
        self.run = Run.resumed(config) if resume else Run.new(config)
        self.store = open_data(config.data) if config.data else _no_data()
        _fits(self.store, config)
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
        self.steps = Steps(self.model, self.optimizers, config.model.precision, config.optimizer.clip, self.device)
        self.average = {name: x.detach().clone() for name, x in self.model.named_parameters()} if config.ema else {}
        self.step = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.without_better = 0
        if resume:
            self._resume()
        self.run.begin(config)

    def _resume(self) -> None:
        folder = checkpoint.newest(self.run.checkpoints)
        if folder is None:
            return  # It stopped before its first one, and begins anew.
        state = checkpoint.load(folder, self.model, self.optimizers, self.average)
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.without_better = state["without_better"]
        self.steps.load_state(state["scaler"])
        self.run.forget_after(self.step)

    def save(self) -> None:
        progress = {
            "best": self.best,
            "best_step": self.best_step,
            "without_better": self.without_better,
            "scaler": self.steps.state(),
        }
        arguments = (self.run.checkpoints, self.step, self.model, self.optimizers, self.average, progress, self.config.keep)
        checkpoint.save(*arguments)

    def take_step(self, tokens: Tensor) -> dict[str, Any]:
        """One step, and what it found. Raises before the weights change if something is not finite and should be."""
        config = self.config
        torch.manual_seed(_mixed(config.seed, self.step))
        rate = learning_rate(config.optimizer, self.step, config.steps)
        set_learning_rate(self.optimizers, rate)
        loss = torch.zeros((), device=self.device)
        for part in tokens.chunk(config.accumulate):
            nats = self.model.loss(part)
            self.steps.backward(nats / config.accumulate)
            loss += nats.detach() / config.accumulate
        norm, stepped = self.steps.step()
        found = float(loss)
        if self.steps.scale is None and not (isfinite(found) and stepped):
            starts = self.training.starts(config.seed, self.step, config.batch)
            raise FloatingPointError(
                f"train: step {self.step + 1} has a loss of {found} and a gradient of norm {norm}; the weights are as they "
                f"were before it. Its batch is the bytes of {config.data} (train) from {', '.join(map(str, starts))} on. "
                "A smaller learning rate, or a longer warm-up, may help."
            )
        with torch.no_grad():
            for name, x in self.model.named_parameters():
                if self.average and stepped:
                    self.average[name].lerp_(x, 1 - config.ema)
        self.step += 1
        return {"loss": found, "learning_rate": rate, "gradient_norm": norm, "skipped": int(not stepped)}

    def validate(self) -> float:
        """Bits per byte; better weights than before are kept as the run's."""
        with self._averaged():
            bits = validate(self.model, self.held_out, self.fixed, self._together(), self.device) / log(2)
            if self.best is None or bits < self.best:
                self.best, self.best_step, self.without_better = bits, self.step, 0
                self.run.save_best(self.model.state_dict())
            else:
                self.without_better += 1
        return bits

    def finish(self) -> None:
        """Samples of the data, and of what the model makes of it."""
        with self._averaged():
            write_samples(self.run.folder, self.store, self.model, self.held_out, self.device)

    def _averaged(self) -> Any:
        """The model with its average weights, if it has them, while the context lasts."""
        return _Swapped(self.model, self.average) if self.average else nullcontext()

    def _together(self) -> int:
        return max(1, self.config.batch // self.config.accumulate)


class _Swapped:
    def __init__(self, model: SparseTransformer, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: Any) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, x in self.model.named_parameters():
            x.data, self.weights[name] = self.weights[name], x.data


def train(
    config: TrainConfig, resume: bool = False, until: int | None = None, console: Console | None = None
) -> Summary:  # fmt: skip
    """Trains, and returns how it ended. `until`: pauses after that step, as Ctrl-C does; `resume` goes on from there."""
    trainer = Trainer(config, resume)
    end = config.steps if until is None else min(until, config.steps)
    model = config.model
    rate = matrix_rate(trainer.device, getattr(torch, model.precision))
    flops = config.batch * step_flops(model)
    begun = perf_counter()
    window = _Window(begun)
    bits, valid, reason = float("nan"), None, DONE
    waited = 0.0
    batches = Prefetch(trainer.training, config.seed, config.batch, trainer.step, end, trainer.device)
    reporter = Reporter(config.steps, trainer.step, trainer.run.folder, config.tensorboard, console)
    with batches, reporter, Interrupts() as interrupts:
        for tokens in batches:
            window.add(trainer.take_step(tokens), tokens.numel())
            reporter.advance(trainer.step)
            last = trainer.step == config.steps
            validated = trainer.step % config.validate_every == 0 or last
            if trainer.step % config.log_every == 0 or validated or trainer.step == end:
                row = window.row(trainer, batches.waited - waited, flops, rate)
                bits, waited = row["bits_per_byte"], batches.waited
                if validated:
                    valid = row["valid_bits_per_byte"] = trainer.validate()
                trainer.run.log(row)
                reporter.row(row)
                window = _Window(perf_counter())
            if trainer.step % config.save_every == 0 or last:
                trainer.save()
            if validated and config.patience and trainer.without_better >= config.patience:
                reason = f"no better validation in {config.patience} of them"
                break
            if interrupts.asked:
                reason = "interrupted"
                break
    if trainer.step < config.steps:
        trainer.save()
        if reason == DONE:
            reason = f"paused after step {trainer.step}"
    seconds = perf_counter() - begun
    if not reason.startswith(("interrupted", "paused")):
        trainer.finish()
    return Summary(
        folder=trainer.run.folder,
        step=trainer.step,
        bits_per_byte=bits,
        valid_bits_per_byte=valid,
        best_bits_per_byte=trainer.best,
        best_step=trainer.best_step,
        seconds=seconds,
        loader_share=batches.waited / seconds,
        reason=reason,
    )


class _Window:
    """Steps since the last line of metrics."""

    def __init__(self, begun: float) -> None:
        self.begun, self.rows, self.bytes = begun, [], 0  # type: tuple[float, list[dict[str, Any]], int]

    def add(self, row: dict[str, Any], count: int) -> None:
        self.rows.append(row)
        self.bytes += count

    def row(self, trainer: Trainer, waited: float, flops: float, rate: float | None) -> dict[str, Any]:
        seconds = perf_counter() - self.begun
        per_step = seconds / len(self.rows)
        loss = _mean(one["loss"] for one in self.rows)
        found: dict[str, Any] = {
            "step": trainer.step,
            "loss": loss,
            "bits_per_byte": loss / log(2),
            "learning_rate": self.rows[-1]["learning_rate"],
            "gradient_norm": self.rows[-1]["gradient_norm"],
            "bytes_per_second": self.bytes / seconds,
            "seconds_per_step": per_step,
            "seconds_left": per_step * (trainer.config.steps - trainer.step),
            "loader_share": waited / seconds,
        }
        if rate is not None:
            found["matrix_share"] = flops / per_step / rate
        used = memory(trainer.device)
        if used is not None:
            found["memory_gib"] = used / GIB
        if trainer.steps.scale is not None:
            found |= {"loss_scale": trainer.steps.scale, "skipped": sum(one["skipped"] for one in self.rows)}
        return found


def _mean(values: Iterable[float]) -> float:
    values = [x for x in values if isfinite(x)]
    return sum(values) / len(values) if values else float("nan")


def _mixed(seed: int, step: int) -> int:
    """Another number for every step of every seed, as a generator's seed."""
    return (seed * 1_000_003 + step + 1) * 0x9E3779B97F4A7C15 % 2**63


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"train: device = {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def _no_data() -> Store:
    raise ValueError("train: --data must be given: a prepared store, or files to make one of")


def _fits(store: Store, config: TrainConfig) -> None:
    """Images must be those that the model's embedding has rows, columns and channels for."""
    sizes = config.model.positions.sizes
    if store.item and config.model.embedding.startswith("image") and tuple(store.item) != tuple(sizes):
        have, want = " x ".join(map(str, store.item)), " x ".join(map(str, sizes))
        raise ValueError(
            f"train: {config.data} has images of {have}, and the model's embedding is for {want}; "
            f"give --model.embedding 'image({', '.join(map(str, store.item))})' and --model.context {store.item_bytes}"
        )
    if "valid" not in store.splits:
        raise ValueError(f"train: {config.data} has no valid split, only {', '.join(store.splits)}")
