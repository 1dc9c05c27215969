"""Tables of `longstride reproduce`: our rows beside the paper's figures."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev

from rich.console import Console

from longstride.commands.bench.report import print_lines, print_table
from longstride.commands.reproduce.experiments import EXPERIMENTS, Experiment, Row
from longstride.commands.reproduce.results import Budget, Reproduced, RowResult, budget_of

FEW = 2
"""The most least contexts that are columns; more are rows."""
BITS = ("paper", "at equal\nbytes", "at equal\nseconds")
COSTS = ("ms\na step", "paper:\ntime", "steps", "MB", "seconds", "minutes\nin all", "GiB")
NOTHING = "-"
READ_OFF = (
    "Equal bytes: validation after the fewest training bytes of all rows; equal seconds: after the shortest training time. "
    "Both are read off the validations of the same runs. The learning rate falls over a whole run, so a run that is cut "
    "short here is behind one that was planned to be short; --seconds plans all rows for the same time. Seconds are steps "
    "at their median time: compilation, validation and checkpoints do not count, and are in the minutes."
)


def show_results(result: Reproduced, console: Console) -> None:
    """Prints the table of an experiment, and what it does not say."""
    experiment = EXPERIMENTS[result.experiment]
    for machine in dict.fromkeys(", ".join(f"{k} {v}" for k, v in row.machine.items()) for row in result.rows):
        print_lines(console, [machine])
    if len(experiment.min_contexts) > FEW:
        _show_by_context(experiment, result, console)
    else:
        for data in dict.fromkeys(row.data for row in result.rows):
            _show_rows(experiment, [row for row in result.rows if row.data == data], data, console)
        print_lines(console, [READ_OFF])
    lines = [f"{row.name}, seed {row.seed}: {row.failure}" for row in result.rows if row.failure]
    lines += [f"{row.name}, seed {row.seed}: not done, step {row.steps:,}" for row in result.rows if not row.done]
    print_lines(console, lines)


def _show_rows(experiment: Experiment, rows: Sequence[RowResult], data: str, console: Console) -> None:
    """A line for each network in two tables; seeds are averaged."""
    budget, known = budget_of(rows), {row.name: row for row in experiment.rows}
    seeds = {
        name: [row for row in rows if row.name == name and row.done] for name in dict.fromkeys(row.name for row in rows)
    }
    unit = "bits per dim" if data == "images" else "bits per byte"
    columns = _contexts(rows, experiment) if len(experiment.min_contexts) > 1 else ["bits"]
    bits = [[name, *_bits(known.get(name), own, budget, len(columns))] for name, own in seeds.items()]
    _print_filled(console, f"{experiment.title}; {data}, {unit}", (*columns, *BITS), bits)
    costs = [[name, *_costs(known.get(name), own)] for name, own in seeds.items()]
    _print_filled(console, "training time, and peak memory", COSTS, costs)
    if budget is not None:
        seconds = "" if budget.seconds is None else f"; equal seconds: {budget.seconds:,.4g} s"
        print_lines(console, [f"equal bytes: {budget.bytes / 1e6:,.4g} MB{seconds}"])


def _print_filled(console: Console, title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table without the columns that no row has a number for, which leaves the names of rows their place."""
    kept = [place for place in range(1, len(headings) + 1) if any(line[place] != NOTHING for line in lines)]
    cut = [[line[0], *(line[place] for place in kept)] for line in lines]
    print_table(console, title, ("row",), [headings[place - 1] for place in kept], cut)


def _contexts(rows: Sequence[RowResult], experiment: Experiment) -> list[str]:
    """Headings of the columns for least contexts, which differ where networks have other contexts than the experiment's."""
    given = [
        sorted({row.scores[place].min_context for row in rows if place < len(row.scores)} or {least})
        for place, least in enumerate(experiment.min_contexts)
    ]
    return [f"least context\n{' or '.join(f'{least:,}' for least in leasts)}" for leasts in given]


def _bits(about: Row | None, rows: Sequence[RowResult], budget: Budget | None, contexts: int) -> list[str]:
    """`rows`: one for each seed."""
    scores = [[row.scores[place].bits_per_byte for row in rows if place < len(row.scores)] for place in range(contexts)]
    return [
        *(_number(values, 4) for values in scores),
        _paper(about.paper_bits if about else None),
        _over(rows, lambda row: row.bits_at_bytes(budget.bytes) if budget else None, 4),
        _over(rows, lambda row: row.bits_at_seconds(budget.seconds) if budget and budget.seconds else None, 4),
    ]


def _costs(about: Row | None, rows: Sequence[RowResult]) -> list[str]:
    return [
        _over(rows, lambda row: None if row.step_seconds is None else 1e3 * row.step_seconds, 1),
        _paper(about.paper_time if about else None),
        _over(rows, lambda row: row.steps, 0),
        _over(rows, lambda row: row.bytes / 1e6, 1),
        _over(rows, lambda row: row.seconds, 1),
        _over(rows, lambda row: row.wall_seconds / 60, 1),
        _over(rows, lambda row: row.memory_gib, 1),
    ]


def _show_by_context(experiment: Experiment, result: Reproduced, console: Console) -> None:
    """One line for each least context; a column for each network and seed, or the run that was given."""
    contexts, columns = by_context(experiment, result)
    lines = [[least, *(_paper(bits[place], 4) for _, bits in columns)] for place, least in enumerate(contexts)]
    headings = [name.replace(", ", "\n") for name, _ in columns]
    print_table(console, experiment.title, ("least context",), headings, lines)
    print_lines(console, [
        f"{name}: {row.scores[0].bytes:,} bytes scored; context {row.context:,}"
        for (name, _), row in zip(columns, result.rows) if row.scores
    ])  # fmt: skip


def by_context(experiment: Experiment, result: Reproduced) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """The least contexts, and the bits at each: of the networks by name, then of the paper. None where there are none."""
    columns = []
    for row in result.rows:
        bits = [score.bits_per_byte for score in row.scores]
        left = len(experiment.min_contexts) - len(bits)
        columns.append((row.settings.get("run") or f"{row.name}, seed {row.seed}", [*bits, *[None] * left]))
    contexts = [
        next((row.scores[place].min_context for row in result.rows if place < len(row.scores)), least)
        for place, least in enumerate(experiment.min_contexts)
    ]
    paper = [experiment.paper.get(least) for least in experiment.min_contexts]
    return [f"{least:,}" for least in contexts], [*columns, ("paper", paper)]


def _over(rows: Sequence[RowResult], value: Callable[[RowResult], float | None], digits: int) -> str:
    return _number([number for row in rows if (number := value(row)) is not None], digits)


def _paper(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _number(values: Sequence[float], digits: int) -> str:
    """The mean of the seeds, with its standard deviation if there are several that differ."""
    if not values:
        return NOTHING
    spread = f" ± {stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{mean(values):,.{digits}f}{spread}"
