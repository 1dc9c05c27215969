import os
import shlex
import subprocess

import pytest

from longstride.training import metrics
from longstride.training.metrics import Metrics, read_metrics
from tests.training.saved import names


def logged(folder, *steps):
    found = Metrics(folder)
    for step in steps:
        found.append({"step": step})
    return found


def steps(folder):
    return [row["step"] for row in read_metrics(folder)]


def test_they_round_trip(tmp_path):
    rows = [{"step": step, "loss": step / 3} for step in (1, 2, 3)] + [{"step": 4, "loss": float("inf")}]
    for row in rows:
        Metrics(tmp_path).append(row)
    rows[3]["loss"] = None  # What is not finite is no JSON.
    assert read_metrics(tmp_path) == rows
    assert Metrics(tmp_path).last_step() == 4
    assert Metrics(tmp_path).last_values("loss", "other") == {"loss": 1.0}


def test_nothing_yet(tmp_path):
    found = Metrics(tmp_path)
    assert found.truncate_after(3) is None
    assert (found.last_step(), found.last_values("loss"), names(tmp_path)) == (0, {}, [])


def test_steps_that_are_done_once_more_are_kept_until_then(tmp_path):
    found = logged(tmp_path, 1, 2, 3, 4)
    assert found.truncate_after(2) == tmp_path / "metrics-to-step-4.jsonl"
    assert steps(tmp_path) == [1, 2]
    logged(tmp_path, 3)
    assert names(tmp_path) == ["metrics-to-step-4.jsonl", "metrics.jsonl"]
    logged(tmp_path, 4)
    assert names(tmp_path) == ["metrics.jsonl"]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_of_several_the_longest_is_kept(tmp_path):
    """A run that is killed again before it has caught up."""
    logged(tmp_path, 1, 2, 3, 4, 5).truncate_after(2)
    logged(tmp_path, 3, 4)
    assert Metrics(tmp_path).truncate_after(2) == tmp_path / "metrics-to-step-5.jsonl"
    assert names(tmp_path) == ["metrics-to-step-5.jsonl", "metrics.jsonl"]
    assert steps(tmp_path) == [1, 2]
    logged(tmp_path, 3, 4, 5, 6)
    assert names(tmp_path) == ["metrics.jsonl"]
    assert Metrics(tmp_path).truncate_after(2) == tmp_path / "metrics-to-step-6.jsonl"


def test_nothing_to_forget(tmp_path):
    found = logged(tmp_path, 1, 2)
    assert found.truncate_after(2) is None
    assert names(tmp_path) == ["metrics.jsonl"]


def test_a_line_cut_short_is_left_out(tmp_path):
    """As a machine leaves it that fails while it is written."""
    found = logged(tmp_path, 1)
    with found.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    found.truncate_after(5)
    found.append({"step": 2})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_lines_stay_as_they_were_written(tmp_path):
    found = Metrics(tmp_path)
    found.path.write_text('{"step":1,   "loss": 1.50}\n{"step": 2}\n')
    found.truncate_after(1)
    assert found.path.read_text() == '{"step":1,   "loss": 1.50}\n'


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"is no run: it has no metrics\.jsonl"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere is no run: there is no such folder; longstride runs lists"):
        read_metrics(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl yet: the run has not logged a step"):
        read_metrics(tmp_path)


LINES = {
    "nonsense": ("nonsense", "line 2 is not JSON: Expecting value"),
    "a list": ("[]", "line 2 must hold a JSON object, got a list"),
    "nothing": ("", "line 2 is not JSON"),
    "no step": ('{"loss": 1}', "line 2: step must be a whole number of at least 0, got None"),
    "a step in words": ('{"step": "one"}', "line 2: step must be a whole number"),
    "a broken step": ('{"step": 1.5}', "line 2: step must be a whole number"),
    "a negative step": ('{"step": -1}', "line 2: step must be at least 0"),
    "a step far away": ('{"step": ' + "9" * 40 + "}", "line 2: step must be at most"),
    "nested": ('{"step": ' + "[" * 50_000, "line 2 is not JSON as this package writes it"),
    "a list for a number": ('{"step": 2, "loss": [1]}', r"line 2: 'loss' must be a number of at most 1e\+100 or null"),
    "words for a number": ('{"step": 2, "loss": "low"}', "line 2: 'loss' must be a number"),
    "a number that is none": ('{"step": 2, "loss": NaN}', "line 2 is not JSON: NaN is not a finite number"),
    "an infinite number": ('{"step": 2, "loss": 1e999}', "line 2 is not JSON: 1e999 is not a finite number"),
    "a huge number": ('{"step": 2, "loss": ' + "9" * 400 + "}", "line 2: 'loss' must be a number"),
    "a long line": ('{"step": 2, "' + "a" * 2**16 + '": 1}', "line 2 has more than 65,536 bytes"),
}


@pytest.mark.parametrize(("line", "says"), LINES.values(), ids=LINES)
def test_damaged_lines_are_named(line, says, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = names(tmp_path)
    for read in (lambda: read_metrics(tmp_path), lambda: Metrics(tmp_path).truncate_after(1)):
        with pytest.raises(ValueError, match=rf"metrics\.jsonl is damaged: {says}") as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
    assert names(tmp_path) == before


def test_a_file_too_large_to_be_drawn_can_still_be_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "LARGEST", 20)
    logged(tmp_path, 1, 2, 3).truncate_after(2)
    assert Metrics(tmp_path).last_step() == 2
    with pytest.raises(ValueError, match=r"metrics.jsonl has 24 bytes; at most 20 are read as a whole"):
        read_metrics(tmp_path)


def test_a_damaged_line_says_how_to_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"line 2 .*; remove that line to go on without it: ") as caught:
        read_metrics(tmp_path)
    subprocess.run(shlex.split(str(caught.value).rpartition(": ")[2]), check=True)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'"):
        Metrics(tmp_path).append({"step": 1})
