"""Trains and scores the rows of an experiment, each as an ordinary run, and writes the results after each.

longstride reproduce table2 --data enwik8 cifar10 --out table2
longstride reproduce contest --data enwik8 --out contest --seconds 420
"""

import gc
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console

from longstride.commands.bench.report import print_lines, reason_of, save
from longstride.commands.ending import exit_if_interrupted
from longstride.commands.evaluate import evaluate
from longstride.commands.reproduce.experiments import Experiment, Row, config_of, min_contexts, train_command, with_steps
from longstride.commands.reproduce.results import Reproduced, RowResult, ScoreRow, read_results
from longstride.commands.reproduce.settings import Reproduction, command_of
from longstride.commands.reproduce.tables import show_results
from longstride.common.device import choose_device, describe_machine
from longstride.common.out_of_memory import is_out_of_memory
from longstride.data import samples
from longstride.data.prepare import open_data
from longstride.data.store import Store
from longstride.model.saved_config import read_config, settings_path
from longstride.model.shipped import find_model
from longstride.training import Summary, TrainConfig, train
from longstride.training.metrics import NAME as METRICS
from longstride.training.metrics import read_metrics
from longstride.training.preflight import check_fits

PROBE_STEPS, PROBE_LINES = 40, 4
"""Steps of a probe, and lines of metrics in it. The first line has the compilation, and does not count."""
TINY_PROBE = 4
TINY_BYTES = {"text": 512, "images": 3072}
"""Bytes that are scored at --scale tiny."""
MANY = 10**6
"""Steps of the run that a probe is the first of."""


def reproduce(experiment: Experiment, settings: Reproduction, console: Console | None = None) -> Reproduced:
    """Runs the rows that are not done yet, and prints the table."""
    console = console or Console()
    assert settings.out is not None
    device = choose_device("reproduce", settings.device)
    rows = experiment.select(settings.rows)
    data = find_data(settings)
    missing = [row.name for row in rows if settings.run is None and row.data not in data]
    if missing and (settings.rows or len(missing) == len(rows)):
        kinds = " and ".join(sorted({row.data for row in rows if row.name in missing}))
        raise ValueError(f"reproduce: --data has no {kinds}, which {', '.join(missing)} need; give a store or a source")
    if missing:
        print_lines(console, [f"left out, as --data has nothing for them: {', '.join(missing)}"])
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / f"{experiment.name}.json"
    before = read_results(path, experiment.name).rows if path.exists() else []
    result = Reproduced(experiment.name, command_of(experiment.name, settings), before)
    runners = []
    for row in rows:
        own = data.get(row.data) if settings.run is None else next(iter(data.values()), None)
        for seed in settings.seeds if row.name not in missing else ():
            runners.append(RowRunner(experiment, settings, row, seed, own, device, result, path, console))
    for one in runners:
        one.check()
    for one in runners:
        one.run()
    show_results(result, console)
    return result


class Data(NamedTuple):
    path: Path
    """As it was given."""
    store: Store


def find_data(settings: Reproduction) -> dict[str, Data]:
    """The given data by kind, text or images; at --scale tiny the bundled samples, unless --run has data of its own."""
    given = settings.data
    if not given and settings.scale == "tiny" and settings.run is None:
        given = samples.path("text"), samples.path("patches")
    found: dict[str, Data] = {}
    for path in given:
        store = open_data(path)
        kind = "images" if store.item else "text"
        if kind in found:
            raise ValueError(f"reproduce: --data has {found[kind].path} and {path}, both {kind}; give one of them")
        found[kind] = Data(path, store)
    return found


class RowRunner:
    """One row with one seed."""

    def __init__(
        self, experiment: Experiment, settings: Reproduction, row: Row, seed: int, data: Data | None, device: torch.device,
        result: Reproduced, path: Path, console: Console,
    ) -> None:  # fmt: skip
        self.experiment, self.settings, self.row, self.seed, self.data = experiment, settings, row, seed, data
        self.device, self.result, self.path, self.console = device, result, path, console
        assert settings.out is not None
        self.folder = settings.out / f"{row.name}-seed-{seed}"
        seconds = settings.seconds or (experiment.seconds if settings.steps is None and settings.scale != "tiny" else None)
        self.seconds = seconds
        self.most_bytes = settings.most_bytes or {
            "reduced": experiment.most_bytes, "full": None, "tiny": TINY_BYTES[row.data]
        }[settings.scale]  # fmt: skip
        self.config = self._config_of(settings.steps)
        self.known = RowResult(row.name, seed, row.data, settings=self._asked())
        self.begun = perf_counter()

    def _config_of(self, steps: int | None) -> TrainConfig:
        return config_of(self.row, self.settings.scale, self.device.type == "cuda", self.seed, steps)

    def _asked(self) -> dict[str, Any]:
        """What a row depends on, besides its own definition and its seed: the same for all rows of one kind of data."""
        settings = self.settings
        return {
            "scale": settings.scale, "seconds": self.seconds, "steps": self.config.steps if self.seconds is None else None,
            "split": settings.split, "most_bytes": self.most_bytes,
            "run": None if settings.run is None else str(settings.run),
            "data": None if self.data is None else self.data.store.sha256,
        }  # fmt: skip

    def check(self) -> None:
        """ValueError if the data is not for this network, or the results have rows that this one cannot be compared with."""
        if self.data is not None and self.settings.run is None:
            advice = f"{self.experiment.name} is for CIFAR-10, which longstride data fetch cifar10 brings"
            check_fits("reproduce", self.data.store, self.config.model, advice)
        for other in self.result.rows:
            difference = self._difference(other.settings) if other.data == self.row.data else ""
            if difference:
                raise ValueError(
                    f"reproduce: {self.path} has {other.name}, seed {other.seed}, with {difference}; give the same, or "
                    "another --out"
                )

    def _difference(self, before: dict[str, Any]) -> str:
        """What a row was asked for, where that is not what is asked for now. Earlier versions kept no data and no default of
        steps."""
        if before.get("steps") is None and before.get("seconds") is None:
            before = {**before, "steps": self._config_of(None).steps}
        now = self._asked()
        if before.get("data", now["data"]) != now["data"]:
            return "other --data"
        name = next((name for name in now if name != "data" and before.get(name) != now[name]), None)
        if name is None:
            return ""
        old, new = ("left out" if value is None else value for value in (before.get(name), now[name]))
        return f"--{name.replace('_', '-')} {old}, and now it is {new}"

    def run(self) -> None:
        """Trains and scores what is not done."""
        self.begun = perf_counter()
        self.known = self.result.find(self.row.name, self.seed) or self.known
        label = f"{self.experiment.name}: {self.row.name}, seed {self.seed}"
        if self.known.done:
            print_lines(self.console, [f"{label} is done"])
            return
        print_lines(self.console, [label])
        self._keep(failure=None, machine=describe_machine(self.device))
        try:
            folder = self.folder if self.settings.run is None else self.settings.run
            if self.settings.run is None:
                self._train()
            else:
                self._describe(folder)
            self._score(folder)
            self._keep(done=1)
        except (FloatingPointError, RuntimeError, MemoryError) as error:
            # The run diverged, or did not fit: the other rows go on.
            if not isinstance(error, FloatingPointError) and not is_out_of_memory(error):
                raise
            self._keep(failure=reason_of(error))
        finally:
            release_memory(self.device)

    def _train(self) -> None:
        config = self._config()
        summary = train(config, "auto", preset=self.row.preset)
        release_memory(self.device)
        self._keep_training(config, summary)
        if not summary.done or summary.signal is not None:
            self._say_how_to_go_on()
            exit_if_interrupted(summary)

    def _say_how_to_go_on(self) -> None:
        print_lines(self.console, [f"to go on: {self.result.command}"])

    def _config(self) -> TrainConfig:
        """The settings of the run. Those of a run that exists have its number of steps, which a probe may have chosen."""
        assert self.data is not None
        settings = self.settings
        config = replace(self.config, data=str(self.data.path), out=str(self.folder), device=settings.device)
        saved = self.folder / "config.json"
        if self.seconds is None:
            return config
        if saved.is_file():
            return with_steps(config, TrainConfig.read(saved).steps, settings.scale)
        try:
            seconds = probe(config, TINY_PROBE if settings.scale == "tiny" else PROBE_STEPS)
        except SystemExit:
            self._say_how_to_go_on()
            raise
        release_memory(self.device)
        steps = max(1, int(self.seconds / seconds))
        print_lines(self.console, [f"{steps:,} steps of {1e3 * seconds:.2f} ms are {self.seconds:g} s"])
        return with_steps(config, steps, settings.scale)

    def _keep_training(self, config: TrainConfig, summary: Summary) -> None:
        # A run that was stopped at once has logged no step yet.
        lines = read_metrics(self.folder) if (self.folder / METRICS).is_file() else []
        validated = [line for line in lines if line.get("valid_bits_per_byte") is not None]
        memory = [line["memory_gib"] for line in lines if line.get("memory_gib")]
        self._keep(
            pattern=config.model.pattern,
            context=config.model.context,
            batch=config.batch,
            parameters=config.model.parameters,
            steps=summary.step,
            step_seconds=step_seconds(lines),
            memory_gib=round(max(memory), 3) if memory else None,
            validation_steps=[float(line["step"]) for line in validated],
            validation_bits=[round(line["valid_bits_per_byte"], 6) for line in validated],
            command=train_command(self.row.preset, config),
        )

    def _describe(self, folder: Path) -> None:
        """Fills in what is known of a run or a model that is only scored."""
        model = read_config(settings_path(find_model(folder)))
        self._keep(pattern=model.pattern, context=model.context, parameters=model.parameters)

    def _score(self, folder: Path) -> None:
        """Scores at the least contexts that are missing; each may take minutes."""
        path = None if self.data is None else self.data.path
        contexts = min_contexts(self.experiment, self.row, self.known.context)
        for least in contexts[len(self.known.scores) :]:
            with redirect_stdout(sys.stderr):  # Standard output has the table of all rows.
                (score,) = evaluate(
                    folder, path, self.settings.split, [least], device=self.settings.device, most_bytes=self.most_bytes
                )
            new = ScoreRow(least, round(score.bits_per_byte, 6), score.bytes, score.windows, round(score.seconds, 3))
            self._keep(scores=[*self.known.scores, new])

    def _keep(self, **changes: Any) -> None:
        """Writes what is known of the row by now."""
        now = perf_counter()
        self.known = replace(self.known, wall_seconds=round(self.known.wall_seconds + now - self.begun, 3), **changes)
        self.begun = now
        self.result.put(self.known, [row.name for row in self.experiment.rows])
        save(self.result, self.path)


def probe(config: TrainConfig, steps: int) -> float:
    """Seconds of a step, from the first steps of a run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        every = max(1, steps // PROBE_LINES)
        config = replace(config, out=f"{folder}/probe", steps=MANY, validate_every=MANY, save_every=MANY, log_every=every)
        exit_if_interrupted(train(config, until=steps))
        seconds = step_seconds(read_metrics(f"{folder}/probe"))
    assert seconds is not None
    return seconds


def step_seconds(lines: Sequence[dict[str, Any]]) -> float | None:
    """The median time of a step. The first line has the compilation, and so has the first after a run was resumed."""
    times = [line["seconds_per_step"] for line in lines if line.get("seconds_per_step")]
    return float(f"{median(times[1:] or times):.6g}") if times else None


def release_memory(device: torch.device) -> None:
    """Frees networks of earlier rows."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
