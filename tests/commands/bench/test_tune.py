"""The search, on a bench that makes times up; what is saved; what is said without a GPU."""

import io
import json

import pytest
import torch
from rich.console import Console

pytest.importorskip("tyro")

from longstride.attention.kernels import saved
from longstride.attention.kernels.launches import LaneKey, LaneSetting, TileKey, TileSetting
from longstride.attention.kernels.settings import Gpu
from longstride.commands import main as cli
from longstride.commands.bench import tune
from longstride.commands.bench.tune import Finding, TuneBenchmark, keep, search, search_all, show
from longstride.commands.bench.workbench import Problem

HALF = torch.bfloat16
KEY = TileKey("forward", True, 64, HALF)
LANES = LaneKey("lane_backward", 64, True, 64, HALF)
SHIPPED = TileSetting(128, 64, 4, 3)


class Made:
    """A bench with a rule for times and for problems, which notes what it is asked."""

    gpu = Gpu("made up", (8, 9), 99 * 2**10)

    def __init__(self, seconds, problems=lambda setting, thorough: None, shipped=SHIPPED, launched=True):
        self.rule, self.problems, self.ships, self.launches = seconds, problems, shipped, launched
        self.timed, self.checked = [], []

    def shipped(self, key):
        return self.ships

    def launched(self, key):
        return self.launches

    def problem(self, key, setting, thorough):
        self.checked.append((setting, thorough))
        return self.problems(setting, thorough)

    def seconds(self, key, settings):
        assert len(set(settings)) == len(settings)
        for setting in settings:
            assert (setting, False) in self.checked, "timed before it was checked"
        self.timed.append(list(settings))
        return [self.rule(setting) for setting in settings]


def distance(best):
    """Times that grow with each field that is not the best one's."""
    return lambda setting: 1.0 + 0.1 * sum(a != b for a, b in zip(setting, best))


def test_it_finds_the_best_in_two_rounds():
    best = TileSetting(64, 32, 8, 2)
    bench = Made(distance(best))
    finding = search(KEY, bench)
    assert finding.found == best
    assert finding.shipped == SHIPPED
    assert (finding.found_ms, finding.shipped_ms) == (1000, pytest.approx(1400))
    assert finding.ratio == pytest.approx(1.4)
    tiles, stages, duel = bench.timed
    assert {one.stages for one in tiles} == {SHIPPED.stages}
    assert {one[:3] for one in stages} == {best[:3], SHIPPED[:3]}
    assert duel == [best, SHIPPED]
    assert finding.tried == len({*tiles, *stages})


def test_it_finds_the_best_for_whole_lanes():
    best = LaneSetting(8, 1, 6)
    assert search(LANES, Made(distance(best), shipped=LaneSetting(4, 2, 2))).found == best


def test_the_shipped_one_stays_if_it_is_best_or_nearly_so():
    finding = search(KEY, Made(distance(SHIPPED)))
    assert (finding.found, finding.shipped_ms) == (None, 1000)
    for factor, kept in ((1.02, False), (1.04, True)):
        finding = search(KEY, Made(lambda setting, factor=factor: factor if setting == SHIPPED else 1.0))
        assert (finding.found is not None) == kept


def test_luck_does_not_last():
    """One that is fast when it is measured among many, and not when it is measured again."""
    lucky = TileSetting(64, 64, 4, 3)
    bench = Made(lambda setting: 0.5 if setting == lucky and len(bench.timed) < 3 else 1.0)
    finding = search(KEY, bench)
    assert bench.timed[-1] == [lucky, SHIPPED]
    assert finding.found is None


def test_wrong_ones_are_dropped_and_reported():
    best = TileSetting(64, 32, 8, 3)

    def problems(setting, thorough):
        return Problem(True, "the first result is wrong") if setting[:3] == best[:3] else None

    bench = Made(distance(best), problems)
    finding = search(KEY, bench)
    assert finding.found != best
    assert finding.found is not None
    assert not any(best in timed for timed in bench.timed)
    assert finding.wrong == ["64x32 8w 3s: the first result is wrong"]
    assert finding.skipped == []


def test_the_winner_is_checked_thoroughly():
    best, second = TileSetting(64, 32, 8, 3), TileSetting(64, 32, 4, 3)

    def problems(setting, thorough):
        return Problem(False, "no room") if thorough and setting[:3] == best[:3] else None

    times = {best: 1.0, second: 1.5}
    finding = search(KEY, Made(lambda setting: times.get(setting, 2.0), problems))
    assert finding.found == second
    assert finding.skipped == ["64x32 8w 3s: no room"]


def test_one_that_runs_replaces_a_shipped_one_that_does_not():
    best = TileSetting(64, 32, 8, 2)
    bench = Made(distance(best), lambda setting, thorough: Problem(False, "no room") if setting == SHIPPED else None)
    finding = search(KEY, bench)
    assert finding.found == best
    assert finding.shipped_ms is None
    assert finding.ratio is None
    assert not any(SHIPPED in timed for timed in bench.timed)


def test_nothing_runs():
    finding = search(KEY, Made(distance(SHIPPED), lambda setting, thorough: Problem(False, "no room")))
    assert finding.found is None
    assert len(finding.skipped) == finding.tried


def test_lanes_that_are_shipped_as_windows():
    best = LaneSetting(8, 2, 4)
    bench = Made(lambda setting: 3.0 if setting is None else distance(best)(setting), shipped=None)
    assert search(LANES, bench).found == best
    assert search(LANES, Made(lambda setting: 0.5 if setting is None else 1.0, shipped=None)).found is None


def test_a_kernel_that_another_stands_for_is_left_alone():
    bench = Made(distance(SHIPPED), launched=False)
    finding = search(KEY, bench)
    assert finding.note == "this GPU has another kernel for it"
    assert not bench.timed


def quiet():
    return Console(file=io.StringIO(), width=140)


def written(console):
    return console.file.getvalue()


def test_a_table_with_ratios():
    console = quiet()
    best = TileSetting(64, 32, 8, 2)
    wrong = TileSetting(128, 128, 8, 3)
    bench = Made(
        distance(best), lambda setting, thorough: Problem(True, "the second is wrong") if setting == wrong else None
    )
    findings = search_all([KEY, TileKey("dq", False, 64, HALF)], bench, console)
    show(findings, console)
    text = written(console)
    for expected in ("forward cells d 64 bfloat16", "dq window d 64", "128x64 4w 3s", "64x32 8w 2s", "1.400"):
        assert expected in text
    assert "forward cells d 64 bfloat16: WRONG and left out: 128x128 8w 3s: the second is wrong" in text


def test_what_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setenv(saved.VARIABLE, str(path))
    other, stale = TileKey("dq", False, 32, HALF), TileKey("dq", True, 64, HALF)
    before = {
        "this": {other: TileSetting(16, 16, 4, 1), stale: TileSetting(32, 32, 4, 1)},
        "that": {KEY: TileSetting(16, 16, 1, 1)},
    }
    saved.write(path, before)
    saved.in_force.cache_clear()
    assert saved.in_force() == before
    found = Finding(KEY, SHIPPED, TileSetting(64, 32, 8, 2))
    console = quiet()
    elsewhere = Finding(other, SHIPPED, note="this GPU has another kernel for it")
    keep(path, "this", before, [found, Finding(stale, SHIPPED), elsewhere], console)
    assert f"wrote {path}: 2 settings for this" in written(console)
    assert "export" not in written(console)
    after = {"this": {other: TileSetting(16, 16, 4, 1), KEY: TileSetting(64, 32, 8, 2)}, "that": before["that"]}
    assert saved.read(path) == after
    assert saved.in_force() == after
    saved.in_force.cache_clear()


def test_nothing_found_writes_nothing(tmp_path):
    console = quiet()
    keep(tmp_path / "kernels.json", "this", {}, [Finding(KEY, SHIPPED)], console)
    assert "the shipped settings are best here" in written(console)
    assert not list(tmp_path.iterdir())


def test_a_file_elsewhere_says_how_it_is_used(tmp_path):
    console = quiet()
    path = tmp_path / "kernels.json"
    keep(path, "this", {}, [Finding(KEY, SHIPPED, TileSetting(64, 32, 8, 2))], console)
    assert f"to use it: export LONGSTRIDE_SETTINGS={path}" in written(console)


@pytest.fixture
def gpu(monkeypatch):
    """As if there were a GPU, with a bench that makes times up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "describe_machine", lambda device: {"device": "made up"})
    bench = Made(distance(TileSetting(64, 32, 8, 2)))
    monkeypatch.setattr(tune, "Workbench", lambda device, repeats: bench)
    return bench


def test_all_of_it(gpu, tmp_path):
    out, results = tmp_path / "kernels.json", tmp_path / "result.json"
    settings = TuneBenchmark(("forward", "dkv"), (64, 128), ("bfloat16", "float16"), out=out, json=results)
    findings = tune.run(settings, quiet())
    assert len(findings) == 2 * 2 * 2 * 2
    keys = [one.key for one in findings]
    assert saved.read(out) == {"made up": {key: TileSetting(64, 32, 8, 2) for key in keys}}
    plain = json.loads(results.read_text())
    assert plain["machine"] == {"device": "made up"}
    assert plain["findings"][0]["key"] == {"kernel": "forward", "summary": False, "width": 64, "dtype": "bfloat16"}
    assert plain["findings"][0]["found"] == {"rows": 64, "columns": 32, "warps": 8, "stages": 2}


def test_nothing_is_saved_if_it_ends_early(gpu, tmp_path):
    out = tmp_path / "kernels.json"
    gpu.rule = lambda setting: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tune.run(TuneBenchmark(out=out), quiet())

    def full(setting):
        raise torch.OutOfMemoryError("out of memory")

    gpu.rule = full
    with pytest.raises(ValueError, match="too little free memory; nothing is saved"):
        tune.run(TuneBenchmark(out=out), quiet())
    assert not list(tmp_path.iterdir())


def test_a_bad_file_is_said_before_the_work(gpu, tmp_path):
    out = tmp_path / "kernels.json"
    out.write_text("[]")
    with pytest.raises(ValueError, match="it must be an object"):
        tune.run(TuneBenchmark(out=out), quiet())
    assert not gpu.timed


def test_which_kernels():
    keys = tune._keys(TuneBenchmark(widths=(64, 256), dtypes=("bfloat16", "float32")))
    assert len(keys) == len(set(keys))
    assert sum(isinstance(key, TileKey) for key in keys) == 2 * 2 * 3 * 2
    lanes = [key for key in keys if isinstance(key, LaneKey)]
    assert {(key.width, key.dtype) for key in lanes} == {(64, torch.bfloat16)}
    assert len(lanes) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "LONGSTRIDE_SETTINGS is empty, which means no file; say with --out where to save"),
        ("--out .", "out = '.' cannot be written"),
        ("--out here.json --json .", "json = '.' cannot be written"),
    ],
)
def test_where_nothing_can_be_saved_nothing_is_tried(gpu, capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    code, err = run(capsys, "bench", "tune", *words.split())
    assert code == 2
    assert says in err
    assert not gpu.checked


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--out there.json", "it times kernels on a CUDA GPU, and torch sees none here"),
        ("", "it times kernels on a CUDA GPU, and torch sees none here"),
        ("--widths 48", "widths must be of 16, 32, 64, 128, 256, got 48"),
        ("--repeats 0", "repeats must be at least 1, got 0"),
        ("--dtypes float16 float16", "dtypes must be one or more different ones"),
        ("--kernels lane_forward --dtypes float32", "whole lanes are for float16 and bfloat16"),
        ("--kernels dv", "--kernels"),
    ],
)
def test_mistakes_end_in_exit_code_2(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, err = run(capsys, "bench", "tune", *words.split())
    assert code == 2
    assert says in err
    assert not list(tmp_path.iterdir())
