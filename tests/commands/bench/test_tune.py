"""The search, on a bench with made-up times; what is saved; errors without a GPU."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

pytest.importorskip("tyro")

from longstride.attention.kernels import saved
from longstride.attention.kernels.saved import KEYS, Setting
from longstride.commands import main as cli
from longstride.commands.bench import tune
from longstride.commands.bench.settings import TuneBenchmark
from longstride.commands.bench.tune import neighbours, save, search

KEY = KEYS["forward summary d64 bfloat16"]
LANES = KEYS["lane_backward 64 accumulate d64 bfloat16"]
SHIPPED = Setting(128, 64, 4, 3)
WRONG = "WRONG result for Local(128)"


class Made:
    """A bench with a rule for times and for problems, which notes what it is asked."""

    def __init__(self, seconds, problem=lambda setting: None, elsewhere=lambda setting: None, key=KEY, shipped=SHIPPED):
        self.rule, self.key, self.shipped = seconds, key, shipped
        self.problems, self.problems_elsewhere = problem, elsewhere
        self.launches = True
        self.timed, self.checked, self.thorough = [], [], []

    def is_launched(self):
        return self.launches

    def problem(self, setting):
        assert setting not in self.checked
        self.checked.append(setting)
        return self.problems(setting)

    def problem_elsewhere(self, setting):
        self.thorough.append(setting)
        return self.problems_elsewhere(setting)

    def seconds(self, settings, repeats):
        assert repeats == 9
        assert len(set(settings)) == len(settings)
        assert set(settings) <= set(self.checked), "timed before it was checked"
        self.timed.append(list(settings))
        return [self.rule(setting) for setting in settings]


def distance(best):
    """Times that grow with each step in a field from the best one."""

    def seconds(setting):
        steps = zip(setting, best, saved.choices(KEY if not best.per_processor else LANES).values())
        return 1.0 + 0.1 * sum(abs(allowed.index(a) - allowed.index(b)) for a, b, allowed in steps)

    return seconds


def test_neighbours_differ_by_one_step_in_one_field():
    others = neighbours(KEY, Setting(64, 256, 4, 1)) - {Setting(64, 256, 4, 1)}
    assert others == {
        Setting(32, 256, 4, 1), Setting(128, 256, 4, 1), Setting(64, 128, 4, 1),
        Setting(64, 256, 2, 1), Setting(64, 256, 8, 1), Setting(64, 256, 4, 2),
    }  # fmt: skip
    assert {one[:2] for one in neighbours(LANES, None)} == {(64, 64)}
    assert len(neighbours(LANES, Setting(64, 64, 4, 2, 2))) == 1 + 3 * 2


@pytest.mark.parametrize("best", [Setting(64, 32, 8, 2), Setting(32, 32, 2, 1), Setting(128, 256, 16, 5)])
def test_it_walks_to_the_best(best):
    bench = Made(distance(best))
    found, line = search(bench, 9)
    assert found == best
    assert bench.thorough[-1] == best
    assert all(SHIPPED in timed for timed in bench.timed)
    assert best in bench.timed[-1]
    assert best in bench.timed[-2]
    shipped_ms = 1e3 * distance(best)(SHIPPED)
    assert line == f"shipped {shipped_ms:.3f} ms, 1000.000 ms with {best}"


def test_it_walks_to_the_best_for_whole_lanes():
    best = Setting(64, 64, 8, 1, 6)
    assert search(Made(distance(best), key=LANES, shipped=Setting(64, 64, 4, 2, 2)), 9)[0] == best


def test_the_shipped_one_stays_if_it_is_best_or_nearly_so():
    assert search(Made(distance(SHIPPED)), 9) == (None, "shipped 1000.000 ms is best")
    for factor, kept in ((1.02, False), (1.04, True)):
        found, _ = search(Made(lambda setting, factor=factor: factor if setting == SHIPPED else 1.0), 9)
        assert (found is not None) == kept


@pytest.mark.parametrize("again", [1.0, 0.98])
def test_luck_does_not_last(again):
    """One that is fast when it is measured first, and about as fast as the shipped one when it is measured again."""
    lucky = Setting(64, 64, 4, 3)
    bench = Made(lambda setting: 1.0 if setting != lucky else 0.5 if len(bench.timed) < 2 else again)
    found, line = search(bench, 9)
    assert len(bench.timed) == 2
    assert bench.timed[-1][:2] == [SHIPPED, lucky]
    assert (found, line) == (None, "shipped 1000.000 ms is best")


def test_wrong_ones_are_dropped_and_reported():
    best = Setting(64, 32, 4, 3)
    bench = Made(distance(best), lambda setting: WRONG if setting == best else None)
    found, line = search(bench, 9)
    assert found not in (None, best)
    assert not any(best in timed for timed in bench.timed)
    assert line.endswith(f"; 1 left out: {WRONG}")


def test_each_step_is_checked_in_all_branches():
    best, second = Setting(64, 64, 4, 3), Setting(128, 64, 8, 3)
    bench = Made(
        lambda setting: {best: 1.0, second: 1.5}.get(setting, 2.0),
        elsewhere=lambda setting: "OutOfResources: shared memory" if setting == best else None,
    )
    found, line = search(bench, 9)
    assert bench.thorough == [best, second]
    assert found == second
    assert line == f"shipped 2000.000 ms, 1500.000 ms with {second}; 1 left out: OutOfResources: shared memory"


def test_one_that_runs_replaces_a_shipped_one_that_does_not():
    best = Setting(64, 32, 8, 2)
    bench = Made(distance(best), lambda setting: "no room" if setting == SHIPPED else None)
    found, line = search(bench, 9)
    assert found == best
    assert line.startswith("shipped inf ms, 1000.000 ms with")
    assert not any(SHIPPED in timed for timed in bench.timed)


def test_nothing_runs():
    bench = Made(distance(SHIPPED), lambda setting: "no room")
    found, line = search(bench, 9)
    assert found is None
    assert line.endswith(f"; {len(bench.checked)} left out: no room")


def test_lanes_for_which_nothing_is_shipped():
    best = Setting(64, 64, 8, 2, 4)
    bench = Made(lambda setting: 3.0 if setting is None else distance(best)(setting), key=LANES, shipped=None)
    assert search(bench, 9)[0] == best
    assert search(Made(lambda setting: 0.5 if setting is None else 1.0, key=LANES, shipped=None), 9)[0] is None


def test_what_is_saved(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setenv(saved.VARIABLE, str(path))
    other, stale = KEYS["dq d32 bfloat16"], KEYS["dq summary d64 bfloat16"]
    before = {
        "this": {other: Setting(16, 16, 4, 1), stale: Setting(32, 32, 4, 1)},
        "that": {KEY: Setting(16, 16, 1, 1)},
    }
    saved.write(path, before)
    saved.in_force.cache_clear()
    assert saved.in_force() == before
    assert save(path, "this", before, {KEY: Setting(64, 32, 8, 2), stale: None}) == f"wrote {path}: 2 settings for this"
    after = {"this": {other: Setting(16, 16, 4, 1), KEY: Setting(64, 32, 8, 2)}, "that": before["that"]}
    assert saved.read(path) == after
    assert saved.in_force() == after
    saved.in_force.cache_clear()


def test_nothing_found_writes_nothing(tmp_path):
    assert save(tmp_path / "kernels.json", "this", {}, {KEY: None}) == "no faster settings were found; nothing is written"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def made(monkeypatch, tmp_path):
    """As if there were a GPU, with benches that make times up, and a file to write."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "gpu", lambda device: SimpleNamespace(name="made up"))
    bench = Made(distance(Setting(64, 32, 8, 2)))
    bench.missing = set()

    def workbench(key, device):
        one = Made(bench.rule, key=key)
        one.launches = key not in bench.missing
        one.timed = bench.timed
        return one

    monkeypatch.setattr(tune, "Workbench", workbench)
    monkeypatch.setenv(saved.VARIABLE, str(tmp_path / "kernels.json"))
    yield bench
    saved.in_force.cache_clear()


def test_all_of_it(made, tmp_path):
    console = Console(file=io.StringIO(), width=140)
    other = KEYS["dkv d128 float16"]
    made.missing = {other}
    tune.run(TuneBenchmark(("forward", "dkv"), (64, 128), ("bfloat16", "float16")), console)
    text = console.file.getvalue()
    assert "dkv d128 float16: this GPU has another kernel for it" in text
    assert "forward summary d64 bfloat16: shipped 1400.000 ms, 1000.000 ms with Setting(rows=64, columns=32" in text
    assert f"wrote {tmp_path / 'kernels.json'}: 15 settings for made up" in text
    found = saved.read(tmp_path / "kernels.json")["made up"]
    assert set(found.values()) == {Setting(64, 32, 8, 2)}
    assert len(found) == 2 * 2 * 2 * 2 - 1
    assert other not in found


@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_nothing_is_saved_if_it_ends_early(made, tmp_path, error):
    def fail(setting):
        raise error

    made.rule = fail
    with pytest.raises(error):
        tune.run(TuneBenchmark())
    assert not list(tmp_path.iterdir())


def test_a_bad_file_is_refused_before_the_work(made, tmp_path):
    (tmp_path / "kernels.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        tune.run(TuneBenchmark())
    assert not made.timed


def test_which_kernels():
    keys = tune._keys(TuneBenchmark(widths=(64, 256), dtypes=("bfloat16", "float32")))
    lanes = [key for key in keys if key.lane]
    assert len(set(keys)) == len(keys) == 2 * 2 * 3 * 2 + len(lanes)
    assert {(key.width, key.dtype) for key in lanes} == {(64, torch.bfloat16)}
    assert len(lanes) == 2 * 3 * 2


def run(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", "LONGSTRIDE_SETTINGS is empty, which means no file; unset it, or name the file to write"),
        (".", "LONGSTRIDE_SETTINGS = '.' cannot be written"),
    ],
)
def test_the_file_is_checked_before_the_work(made, capsys, monkeypatch, path, error):
    monkeypatch.setenv(saved.VARIABLE, path)
    code, err = run(capsys, "bench", "tune")
    assert code == 2
    assert error in err
    assert not made.timed


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "it times kernels on a CUDA GPU, and torch sees none here"),
        ("--widths 48", "--widths"),
        ("--repeats 0", "repeats must be at least 1, got 0"),
        ("--kernels lane_forward --dtypes float32", "whole lanes are for float16 and bfloat16"),
        ("--kernels dv", "--kernels"),
    ],
)
def test_mistakes_end_in_exit_code_2(capsys, monkeypatch, tmp_path, words, error):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, err = run(capsys, "bench", "tune", *words.split())
    assert code == 2
    assert error in err
    assert not list(tmp_path.iterdir())
