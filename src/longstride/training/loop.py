"""train(config): the loop of section 6 of the paper, from a store of bytes to a run's folder."""

import io
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from longstride.common.checks import whole_number
from longstride.common.console import Progress, StandardError, print_line
from longstride.data.loader import Prefetch
from longstride.training.checkpoint import SaveError
from longstride.training.config import TrainConfig
from longstride.training.fitting import fit_to_data
from longstride.training.interrupts import Interrupts
from longstride.training.ranks import Ranks, joined
from longstride.training.reporting import Summary, TensorBoard, check_tensorboard, describe
from longstride.training.run import Resume, Run, check_resume
from longstride.training.speed import Speed, matrix_rate
from longstride.training.trainer import Trainer

DONE, INTERRUPTED = "all steps are done", "interrupted"


def train(
    config: TrainConfig, resume: Resume = False, until: int | None = None, console: Console | None = None,
    fit: Collection[str] = (),
) -> Summary:  # fmt: skip
    """Trains, and returns how it ended. `until`: pauses after that step, as Ctrl-C does; `resume` goes on from there.

    A run that is resumed with more `steps` than it began with, finished or not, is extended: each further step has the
    learning rate that it would have in a run of the new total, so that of a finished run rises again and then decays to the
    new end. All other settings that a step depends on must be the run's own.

    resume="auto" is for batch systems that start a job again: it begins a run that is not there, and goes on with one that
    is. One that never came to a checkpoint begins anew, and its metrics are kept under another name until it has caught up.
    Processes that torchrun has started train one model together; all return the same.

    fit: of the model's context, embedding and pattern those that follow from the data, if that has images of another size.
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
        return _train(config, resume, end, ranks, console, fit)


def _train(
    config: TrainConfig, resume: Resume, end: int, ranks: Ranks, console: Console | None, fit: Collection[str]
) -> Summary:  # fmt: skip
    if not ranks.first:
        console = Console(file=io.StringIO())
    console = console or StandardError()
    say = partial(print_line, console)
    config = fit_to_data(config, fit, resume, ranks, say)
    with closing(Trainer(config, resume, ranks, say)) as trainer:
        rate = matrix_rate(trainer.device, getattr(torch, config.model.precision))
        speed = Speed(config, rate, trainer.device, ranks.count)
        first, shown = trainer.step, config.tensorboard and ranks.first
        progress = Progress(config.steps, console, done=first, steps=True)
        board = ranks.run_on_all(lambda: TensorBoard(trainer.run.folder, shown))

        def report(row: dict[str, Any]) -> None:
            trainer.run.log(row)
            progress.log(row["step"], describe(row))
            board.add(row)

        batches = Prefetch(trainer.training, config.seed, config.batch, first, end, trainer.device, ranks.rank, ranks.count)
        with batches, board, progress, Interrupts(ranks.first) as interrupts:
            try:
                interrupted = _loop(trainer, batches, progress, report, speed, interrupts)
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
                trainer.finish(say)
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


def _loop(
    trainer: Trainer, batches: Prefetch, progress: Progress, report: Callable[[dict[str, Any]], None], speed: Speed,
    interrupts: Interrupts,
) -> bool:  # fmt: skip
    """Trains until the batches end, validation no longer improves, or a signal comes. Returns True for a signal."""
    config, ranks = trainer.config, trainer.ranks
    for tokens in () if trainer.out_of_patience else batches:
        found = trainer.take_step(tokens)
        speed.steps += 1
        progress.update(trainer.step)
        last = trainer.step == config.steps
        validated = trainer.step % config.validate_every == 0 or last
        if trainer.step % config.log_every == 0 or validated:
            row = {**trainer.standing.loss_row(trainer.step), **found, **speed.row(trainer.step, batches.waited)}
            if trainer.updates.scale is not None:
                row["loss_scale"] = trainer.updates.scale
            if validated:
                row["valid_bits_per_byte"] = trainer.validate()
            ranks.run_on_first(partial(report, row))
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
