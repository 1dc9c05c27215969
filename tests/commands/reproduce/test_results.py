import json

import pytest

from longstride.commands.bench.report import save
from longstride.commands.reproduce.results import Reproduced, budget_of, read_results
from tests.commands.reproduce.rows import row


def test_bits_are_read_off_the_curve():
    one = row(bits=1.0, step_seconds=0.5)
    assert (one.bytes, one.seconds, one.bits) == (400, 2.0, 1.0)
    assert [one.bits_at_bytes(count) for count in (100, 200, 300, 400, 500)] == [None, 2.0, 1.5, 1.0, None]
    assert [one.bits_at_seconds(seconds) for seconds in (0.5, 1.0, 1.75, 2.0, 2.5)] == [None, 2.0, 1.25, 1.0, None]
    untrained = row(step_seconds=None, batch=0, steps=0, scores=[])
    assert untrained.seconds is untrained.bits is untrained.bits_at_bytes(1) is untrained.bits_at_seconds(1) is None


def test_a_budget_is_what_all_rows_have_had():
    slow, fast, stopped = row(step_seconds=2.0), row("enwik8-dense", step_seconds=0.25, steps=6), row(steps=1, done=0)
    budget = budget_of([slow, fast, stopped])
    assert (budget.bytes, budget.seconds) == (400, 1.5)
    assert budget_of([stopped]) is None
    untimed = budget_of([row(step_seconds=None), row("enwik8-dense", step_seconds=None, steps=6)])
    assert (untimed.bytes, untimed.seconds) == (400, None)


def test_rows_are_kept_in_order_and_replaced():
    result = Reproduced("table2", "longstride reproduce table2")
    for one in (row("b", seed=1), row("a"), row("b"), row("b", seed=1, bits=7.0)):
        result.put(one, ["a", "b"])
    assert [(one.name, one.seed, one.bits) for one in result.rows] == [("a", 0, 1.2), ("b", 0, 1.2), ("b", 1, 7.0)]
    assert result.find("b", 1).bits == 7.0
    assert result.find("c", 1) is None


def test_results_are_read_as_they_were_written(tmp_path):
    result = Reproduced("table2", "longstride reproduce table2", [row(), row("enwik8-dense", failure="no memory", done=0)])
    save(result, tmp_path / "table2.json")
    assert read_results(tmp_path / "table2.json") == result


@pytest.mark.parametrize(
    "content",
    [[], {}, {"experiment": "table2", "rows": {}}, {"experiment": "table2", "rows": [1]},
     {"experiment": "table2", "rows": [{"name": 3}]}, {"experiment": "table2", "rows": [{"name": "a", "scores": [{}]}]}],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"other\.json") as error:
        read_results(path)
    assert "\n" not in str(error.value)
