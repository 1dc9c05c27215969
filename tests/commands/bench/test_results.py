import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from longstride.commands.bench.attention import run
from longstride.commands.bench.attention_tables import crossing_line
from longstride.commands.bench.measure import Ceilings
from longstride.commands.bench.report import save
from longstride.commands.bench.results import CallerTimes, Crossing, Result, Row, conclude, crossings, read_result
from longstride.commands.bench.settings import AttentionBenchmark

KEPT = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("attention-*.json"))
LENGTHS = (256, 512, 1024, 2048)


def timed(name, n, forward, both, eager=None):
    return Row(f"n = {n:,}", n, name, "", n, forward_ms=forward, both_ms=both, peak_mib=1.0, eager=eager)


def rows_of(name, forward, both, eager=None):
    """Of all lengths, with times in milliseconds, None where there is none."""
    eager = eager or [None] * 4
    return [timed(name, *values) for values in zip(LENGTHS, forward, both, eager)]


def test_crossing_is_the_first_length_after_which_all_are_faster():
    rows = rows_of("SDPA dense", [2, 2, 2, 2], [2, 2, 2, None])
    rows += rows_of("SDPA dense flash", [3, 3, 3, 1], [3, 3, 3, 3])  # The fastest SDPA of a length counts.
    rows += rows_of("a", [1, 3, 1, 0.5], [1, 1, 1, 4])
    rows += rows_of("b", [1, 1, 1, 1.5], [9, 9, 9, 1])
    rows += rows_of("c", [None] * 4, [None] * 4)
    rows += rows_of("SDPA view c", [1] * 4, [1] * 4)
    assert crossings(rows) == [
        Crossing("a", "kernels", forward=1024, both=None, longest=2048),
        Crossing("b", "kernels", forward=None, both=2048, longest=2048),
    ]


def test_a_callers_crossing_is_its_own():
    dense, ours = CallerTimes(0.1, 0.3), CallerTimes(0.2, 0.2)
    rows = rows_of("SDPA dense", [2] * 4, [2] * 4, [dense] * 4) + rows_of("a", [1] * 4, [1] * 4, [ours] * 4)
    assert crossings(rows) == [
        Crossing("a", "kernels", forward=256, both=256, longest=2048),
        Crossing("a", "caller", forward=None, both=256, longest=2048),
    ]


def test_a_caller_waits_for_the_longer_of_elapsed_and_host_time():
    dense, ours = CallerTimes(0.1, 0.3, 20, 100), CallerTimes(0.05, 0.2, 150, 250)
    rows = rows_of("SDPA dense", [2] * 4, [2] * 4, [dense] * 4) + rows_of("a", [1] * 4, [1] * 4, [ours] * 4)
    assert (ours.forward_wait_ms, ours.both_wait_ms, dense.forward_wait_ms) == (0.15, 0.25, 0.1)
    assert Crossing("a", "caller", forward=None, both=256, longest=2048) in crossings(rows)


def test_one_length_alone_has_no_crossing():
    rows = [timed("SDPA dense", 256, 2, 2), timed("a", 256, 1, 1), timed("SDPA dense", 512, 2, 2)]
    assert crossings(rows) == []
    assert crossings([*rows, timed("a", 512, 3, 1)]) == [Crossing("a", "kernels", forward=None, both=256, longest=512)]


def test_crossings_in_words():
    crossing = Crossing("local(4)", "caller", forward=1024, both=None, longest=2048)
    says = "local(4): faster than SDPA dense from n = 1,024 forward, not up to n = 2,048 with backward"
    assert crossing_line(crossing, on_gpu=True) == says + " (a caller's time)"
    assert crossing_line(Crossing("local(4)", "kernels", 1024, None, 2048), on_gpu=False) == says


def test_shapes_that_differ_in_more_than_length_have_no_crossing():
    rows = [Row(shape, n, name, "", n, 1.0, 1.0) for shape, n in (("x", 4), ("y", 8)) for name in ("SDPA dense", "a")]
    result = Result({}, {}, Ceilings(1, 1), rows)
    conclude(result)
    assert not result.crossings


@pytest.fixture
def result():
    times = CallerTimes(0.5, 1.5, 40.0, 210.0)
    rows = rows_of("SDPA dense", [2] * 4, [2] * 4, [times] * 4) + rows_of("a", [1] * 4, [1] * 4, [times] * 4)
    made = Result({"device": "a GPU", "triton": "3"}, {"heads": 2}, Ceilings(4e12, 8e14), rows, left_out=["varlen: why"])
    conclude(made)
    return made


def test_a_file_is_read_as_it_was_written(tmp_path, result):
    path = tmp_path / "result.json"
    save(result, path)
    assert read_result(path) == result
    row = json.loads(path.read_text())["rows"][0]
    assert row["eager"] == {"forward_ms": 0.5, "both_ms": 1.5, "host_forward_us": 40.0, "host_both_us": 210.0}
    assert row["compiled"] is None


def test_reading_prints_and_measures_nothing(tmp_path, monkeypatch, result):
    monkeypatch.setattr("longstride.commands.bench.attention._measure", None)
    path = tmp_path / "result.json"
    save(result, path)
    console = Console(file=io.StringIO(), width=120)
    run(AttentionBenchmark(read=path), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "n = 256, GPU time: kernels alone",
        "n = 256, a caller's time: elapsed (triton's do_bench), and of the host until a call returns",
        "0.500 / 1.500",
        "40.0 / 210.0",
        "left out: varlen: why",
        "a: faster than SDPA dense from n = 256 forward, from n = 256 with backward (GPU time)",
        "a: faster than SDPA dense not up to n = 2,048 forward, not up to n = 2,048 with backward (a caller's time)",
    ):
        assert words in text, words


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_results_of_earlier_versions_are_read(path):
    result = read_result(path)
    assert result.rows
    assert result.on_gpu == ("h200" in path.name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": {}}, "must be lists"),
        ({"rows": [4]}, "a Row must be an object, got 4"),
        ({"rows": [{"shape": "x", "n": "12"}]}, "n of a Row is '12'"),
        ({"rows": [{"shape": "x", "n": True}]}, "n of a Row is True"),
        ({"rows": [{"shape": "x", "n": 2**70}]}, "n of a Row is 1180591620717411303424"),
        ({"rows": [{"shape": "x", "forward_ms": 10**400}]}, "forward_ms of a Row is 1000"),
        ({"rows": [{"shape": "x"}]}, "missing 4 required positional arguments"),
        ({"rows": [{"eager": {"forward_ms": "fast"}}]}, "forward_ms of a CallerTimes is 'fast'"),
        ({"machine": None}, "machine must be an object"),
        ({"machine": {"device": [1]}}, "machine must be an object"),
        ({"settings": 4}, "object is not iterable"),
        ({"ceilings": None}, "a Ceilings must be an object, got None"),
        ({"left_out": 3}, "must be lists, got 3"),
    ],
)
def test_other_files_are_refused(tmp_path, result, change, says):
    path = tmp_path / "result.json"
    save(result, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        ValueError, match=r"bench attention: read = '.*result\.json' is no file of bench attention --json: "
    ) as error:
        read_result(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
