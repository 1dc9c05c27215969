import io
from dataclasses import replace

from rich.console import Console

from longstride.commands.reproduce.results import Reproduced, ScoreRow
from longstride.commands.reproduce.tables import show_results
from tests.commands.reproduce.rows import row


def shown(experiment, *rows) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    show_results(Reproduced(experiment, "", list(rows)), console)
    return console.file.getvalue().splitlines()


def line(lines, start) -> list[list[str]]:
    return [text.split() for text in lines if text.strip().startswith(start)]


def test_rows_stand_beside_the_papers():
    lines = shown("table2", row("enwik8-dense", bits=1.5, step_seconds=1.0), row("enwik8-fixed", bits=1.2, step_seconds=0.5))
    bits, costs = line(lines, "enwik8-dense")
    assert bits == ["enwik8-dense", "1.5000", "1.00", "1.5000", "2.5000"]  # After 2 s it is at step 2.
    assert costs == ["enwik8-dense", "1,000.0", "1.31", "4", "0.0", "4.0", "1.5"]  # No row has a peak of memory.
    assert line(lines, "enwik8-fixed")[0] == ["enwik8-fixed", "1.2000", "0.99", "1.2000", "1.2000"]
    assert any("equal bytes: 0.0004 MB; equal seconds: 2 s" in text for text in lines)
    assert any("read off the validations of the same runs" in text for text in lines)


def test_rows_without_times_are_compared_at_equal_bytes():
    lines = shown("ablations", row("text-base", bits=1.5, step_seconds=None), row("text-c-8", step_seconds=None, steps=8))
    assert line(lines, "text-base")[0] == ["text-base", "1.5000", "1.5000"]
    assert any(text.strip() == "equal bytes: 0.0004 MB" for text in lines)


def test_seeds_are_averaged():
    lines = shown("table2", row(bits=1.0), row(bits=1.2, seed=1), row("enwik8-dense", done=0, steps=2))
    assert line(lines, "enwik8-fixed")[0][:4] == ["enwik8-fixed", "1.1000", "±", "0.1414"]
    assert any("enwik8-dense, seed 0: not done, step 2" in text for text in lines)


def test_least_contexts_are_lines():
    scores = [ScoreRow(least, 1.3 - place / 10, 500, 2, 0.1) for place, least in enumerate((0, 6144))]
    lines = shown("table3", row(scores=scores, done=0))
    assert line(lines, "6,144") == [["6,144", "1.2000", "0.9952"]]
    assert line(lines, "12,160") == [["12,160", "-", "0.9908"]]


def test_the_contest_has_a_column_for_each_least_context():
    scores = [ScoreRow(0, 1.3, 500, 2, 0.1), ScoreRow(512, 1.25, 500, 2, 0.1)]
    lines = shown("contest", row("text-modern", scores=scores))
    assert line(lines, "text-modern")[0][:4] == ["text-modern", "1.3000", "1.2500", "1.2000"]
    assert any(text.split()[:3] == ["row", "0", "512"] for text in lines)


def test_columns_that_no_row_fills_leave_their_place_to_names():
    scores = [ScoreRow(0, 1.3, 500, 2, 0.1), ScoreRow(512, 1.25, 500, 2, 0.1)]
    rows = [row("text-modern", scores=scores, seed=seed, bits=1 + seed / 10) for seed in (0, 1)]
    lines = shown("contest", *rows, row("text-modern", seed=2, scores=[replace(one, bits_per_byte=1.4) for one in scores]))
    assert not any("paper" in text for text in lines)
    assert line(lines, "text-moder")[0][1:4] == ["1.3333", "±", "0.0577"]


def test_failures_are_said():
    assert any("enwik8-fixed, seed 0: no memory" in text for text in shown("table2", row(failure="no memory", done=0)))
