"""train(config): the loop of section 6 of the paper, from a store of bytes to a run's folder."""

import io
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from functools import partial
from time import perf_counter
from typing import Any

from rich.console import Console

from longstride.common.checks import whole_number
from longstride.common.console import Progress, StandardError, print_line, with_noun
from longstride.common.device import keep_freed_memory
from longstride.data.loader import Prefetch
from longstride.training.budget import memory_limit, resolve_recomputation, with_advice
from longstride.training.checkpoint import SaveError
from longstride.training.config import Resume, TrainConfig
from longstride.training.interrupts import Interrupts
from longstride.training.preflight import fit_to_data, resolve_precision
from longstride.training.ranks import Ranks, join_process_group
from longstride.training.reporting import DONE, INTERRUPTED, Summary, TensorBoard, check_tensorboard, describe
from longstride.training.run import Run, check_resume
from longstride.training.speed import Speed, matrix_rate
from longstride.training.trainer import Trainer


def train(
    config: TrainConfig, resume: Resume = False, until: int | None = None, console: Console | None = None,
    fit: Collection[str] = (), preset: str = "",
) -> Summary:  # fmt: skip
    """Trains a run and returns its Summary.

    until: pause after that step, as Ctrl-C does; `resume` continues from there.
    resume: continue an existing run. With more `steps` than before, the run is extended: further steps have the learning
        rates of a run of the new total. All other settings that a step depends on must be unchanged.
        "auto" is for batch systems that restart jobs: it begins the run, or resumes it if it exists. A run without a
        checkpoint starts again from step 0; its metrics are kept under another name until it has caught up.
    fit: which of the model's context, embedding and pattern to derive from the data, if it has images of another size.
    preset: name of the preset that the config was made from; data of another kind than the preset's is refused, and so is
        to resume a run that began with another preset.

    Processes that torchrun has started train one model together, and return the same Summary.
    """
    end = config.steps if until is None else min(whole_number("train", "until", until, 1), config.steps)
    check_resume(resume)
    if config.tensorboard:
        check_tensorboard()
    with join_process_group(config.device) as ranks:
        # After a restart by torchrun, resume the run that this launch began, but no run that existed before.
        begun = ranks.run_on_first(lambda: ranks.restarted and Run.is_of_this_launch(config))
        if ranks.any(bool(begun)):
            resume = "auto"
        elif resume == "auto":
            resume = "auto" if ranks.any(bool(ranks.run_on_first(lambda: Run.exists(config)))) else False
        return _train(config, resume, end, ranks, console, fit, preset)


def _train(
    config: TrainConfig, resume: Resume, end: int, ranks: Ranks, console: Console | None, fit: Collection[str], preset: str
) -> Summary:  # fmt: skip
    console = (console or StandardError()) if ranks.is_main else Console(file=io.StringIO())
    say = partial(print_line, console)
    config = fit_to_data(config, fit, resume, ranks, say)
    config = resolve_precision(config, resume, ranks)
    config = resolve_recomputation(config, resume, ranks, say)
    device = ranks.run_on_all(lambda: ranks.device(config.device))
    if device.type == "cpu":
        keep_freed_memory()
    with memory_limit(config, device), with_advice(config, device, ranks.count):
        return _run(config, resume, end, ranks, console, say, preset)


def _run(
    config: TrainConfig, resume: Resume, end: int, ranks: Ranks, console: Console, say: Callable[[str], None], preset: str
) -> Summary:  # fmt: skip
    with closing(Trainer(config, resume, ranks, say, preset)) as trainer:
        rate = matrix_rate(trainer.device, config.model.dtype)
        speed = Speed(config, rate, trainer.device, ranks.count)
        first, shown = trainer.step, config.tensorboard and ranks.is_main
        progress = Progress(config.steps, console, done=first, steps=True)
        board = ranks.run_on_all(lambda: TensorBoard(trainer.run.folder, shown))

        def report(row: dict[str, Any]) -> None:
            trainer.run.log(row)
            progress.log(row["step"], describe(row))
            board.add(row)

        batches = Prefetch(trainer.training, config.seed, config.batch, first, end, trainer.device, ranks.rank, ranks.count)
        with batches, board, progress, Interrupts(ranks.is_main) as interrupts:
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
                if interrupts.requested and ranks.is_peer_failure(error):  # A second signal ended the other processes.
                    raise KeyboardInterrupt from None
                if isinstance(error, SaveError) or not isinstance(error, OSError):
                    raise
                with suppress(OSError):  # Another failure of the save is not the one to report.
                    trainer.checkpoints.wait()
                full = OSError(f"train: step {trainer.step}: {error}; {trainer.checkpoints.resume_hint()}")
                full.__notes__ = getattr(error, "__notes__", [])
                raise full from None
            reason = DONE
            if trainer.out_of_patience:
                reason = f"no improvement in the last {with_noun(config.patience, 'validation')}"
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
            best_bits_per_byte=trainer.run_state.best,
            best_step=trainer.run_state.best_step,
            seconds=seconds,
            bytes_per_second=(trainer.step - first) * config.batch * config.model.context / seconds,
            loader_share=batches.waited / seconds,
            reason=reason,
            done=trainer.out_of_patience or trainer.step == config.steps,
            signal=interrupts.signal if interrupts.requested else None,
        )


def _loop(
    trainer: Trainer, batches: Prefetch, progress: Progress, report: Callable[[dict[str, Any]], None], speed: Speed,
    interrupts: Interrupts,
) -> bool:  # fmt: skip
    """Trains until the batches end, validation no longer improves, or a signal comes. Returns True for a signal."""
    config, ranks = trainer.config, trainer.ranks
    for tokens in () if trainer.out_of_patience else batches:
        trainer.take_step(tokens)
        speed.steps += 1
        progress.update(trainer.step)
        last = trainer.step == config.steps
        validated = trainer.step % config.validate_every == 0 or last
        if trainer.step % config.log_every == 0 or validated:
            step_metrics = trainer.finish_steps()
            row = {**trainer.run_state.loss_row(trainer.step), **step_metrics, **speed.row(trainer.step, batches.waited)}
            row["skipped"] = trainer.run_state.skipped
            if validated:
                row["valid_bits_per_byte"] = trainer.validate()
            ranks.run_on_first(partial(report, row))
            trainer.run_state.begin_row()
            speed.restart(batches.waited)
            trainer.write_unwritten_best()
        if trainer.step % config.save_every == 0 or last:
            trainer.save()
        # One collective for two facts: a failed save (2), and a signal (1), on any process.
        flags = ranks.maximum(2 * trainer.checkpoints.failed + interrupts.requested)
        if flags >= 2:
            trainer.checkpoints.wait()
        if flags:
            interrupts.mark_requested()
        if trainer.out_of_patience:
            return False
        if flags and not last:
            return True
    return False
